"""An array's tasks are counted, and named as Slurm's commands take them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuwarden.platforms.slurm_arrays import MOST_NAMED, ArrayTasks, decode_tasks


@pytest.mark.parametrize(
    ("text", "count", "ranges", "limit"),
    [
        ("0-5", 6, "0-5", None),
        ("1-5%2", 5, "1-5", 2),
        ("7-40:3%2", 12, "7,10,13,16,19,22,25,28,31,34,37,40", 2),
        ("1,3,9-11", 5, "1,3,9-11", None),
        ("1,3,5,...", None, "", None),
        # Slurm 22.05 cuts the list off before the limit, and others behind it.
        ("1,3,5...%4", None, "", 4),
        ("1,3,5%4...", None, "", 4),
        ("0-4000000:2", 2_000_001, "", None),
    ],
)
def test_a_list_is_read_as_slurm_means_it(
    text: str, count: int | None, ranges: str, limit: int | None
) -> None:
    """Its commands refuse the step and the limit that it prints itself."""
    assert decode_tasks(text) == ArrayTasks(text, count, ranges, limit)


@pytest.mark.parametrize("text", ["", "7", "N/A", "(null)", "0xFF", "a-b", "%2", "-1", ",", "1;2"])
def test_what_is_no_list_is_none(text: str) -> None:
    """A single task is a job as any other."""
    assert decode_tasks(text) is None


def test_a_long_list_is_shown_short() -> None:
    """It is part of a number that people read, and contracts bound."""
    found = decode_tasks(",".join(map(str, range(1, 3000, 2))))
    assert found is not None
    assert found.count == 1500
    assert found.shown.endswith("...")
    assert len(found.shown) < 60


@given(
    spans=st.lists(
        st.tuples(st.integers(0, 5000), st.integers(0, 200), st.integers(1, 9)), min_size=1
    )
)
def test_named_tasks_are_those_of_the_list(spans: list[tuple[int, int, int]]) -> None:
    """Every one, and no other; or none where they are too many."""
    wanted = [task for at, more, step in spans for task in range(at, at + more + 1, step)]
    text = ",".join(f"{at}-{at + more}:{step}" for at, more, step in spans)
    found = decode_tasks(text)
    assert found is not None
    assert found.count == len(wanted)
    named: list[int] = []
    for part in filter(None, found.ranges.split(",")):
        first, _, last = part.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == wanted if found.ranges else len(wanted) > MOST_NAMED
