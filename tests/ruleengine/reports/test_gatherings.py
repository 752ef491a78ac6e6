"""Reports on a real Prometheus: hours to the sample, gaps that are no use, portions that agree."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner
from tests.ruleengine.reports.days import BEGIN
from tests.servers import backfill, free_port, prometheus

from gpuwarden.cli import main
from gpuwarden.errors import ServiceUnavailable
from gpuwarden.ruleengine.reports.cli import report

if TYPE_CHECKING:
    from pathlib import Path

    from tests.servers import Server

SPAN = ("--from", "2025-06-15", "--to", "2025-06-16")


@pytest.fixture(scope="module")
def day(server: Server) -> dict[str, Any]:
    """The document of the whole day."""
    return asked(server)


def asked(server: Server, *more: str, whole: bool = True) -> dict[str, Any]:
    """The document that the command writes about the day."""
    span = SPAN if whole else ()
    arguments = ["--prometheus", server.url, "--output", "json", *span, *more]
    done = CliRunner().invoke(report, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_hours_are_right_and_a_gap_is_no_use(day: dict[str, Any]) -> None:
    """23 hours of which Prometheus knows; a shared card is halved; a dark node held nothing."""
    hours = {row["user"]: row["held_hours"] for row in day["people"]}
    # two moments of five minutes may fall to either side of where something begins
    assert hours == {
        "ana": pytest.approx(11 + 6, abs=0.1),
        "ben": pytest.approx(23, abs=0.1),
        "cho": pytest.approx(10, abs=0.1),
        "eve": pytest.approx(6, abs=0.1),
    }
    assert day["totals"]["idle_hours"] == pytest.approx(23, abs=0.2)
    assert day["totals"]["card_hours"] == pytest.approx(2 * 23 + 21, abs=0.2)
    assert day["totals"]["coverage"] == pytest.approx((23 + 21) / 48, abs=0.002)
    assert day["week"][6][10] is None
    assert day["week"][6][9] == pytest.approx(1.6 / 3, abs=0.001)


def test_a_card_is_idle_when_it_was_seen_idle_for_long_enough(server: Server) -> None:
    """A job that has just begun loads its data: half of the five minutes must have been seen."""
    span = ("--from", "2025-06-15", "--to")
    young = asked(server, *span, "2025-06-15T00:01:30", whole=False)
    later = asked(server, *span, "2025-06-15T00:20:00", whole=False)

    assert young["totals"]["held_hours"] > 0
    assert young["totals"]["idle_hours"] == 0
    assert later["totals"]["held_hours"] == pytest.approx(2 * 20 / 60, abs=0.02)
    assert later["totals"]["idle_hours"] == pytest.approx(18 / 60, abs=0.02)


def test_a_short_report_counts_an_instance_by_its_share(tmp_path: Path) -> None:
    """As the recorded hours do: one job has a seventh of a card, the other a whole one."""
    job, lines = 'job="gpuwarden",instance="n1:9835"', []
    own = {"ana": f'{job},gpu="0",uuid="MIG-1"', "ben": f'{job},gpu="1",uuid="GPU-1"'}
    series = {
        "up": [(job, 1.0)],
        "gpu_up": [(f'{job},gpu="{n}",uuid="GPU-{n}"', 1.0) for n in range(2)],
        "gpu_job_info": [(f'{job},job_id="j-{user}",user="{user}"', 1.0) for user in own],
        "gpu_job_holds_gpu": [(f'{text},job_id="j-{user}"', 1.0) for user, text in own.items()],
        "card:gpu_share:ratio": [('instance="n1:9835",uuid="MIG-1"', 1 / 7)],
    }
    for name, rows in series.items():
        lines.append(f"# TYPE {name} gauge")
        for labels, value in rows:
            lines += [f"{name}{{{labels}}} {value} {BEGIN + 5 * n}" for n in range(121)]
    backfill("\n".join([*lines, "# EOF\n"]), tmp_path / "tsdb")
    with prometheus("global: {}\n", tmp_path / "tsdb") as server:
        span = ("--from", "2025-06-15", "--to", "2025-06-15T00:10:00")
        found = asked(server, *span, whole=False)

    hours = {row["user"]: row["held_hours"] for row in found["people"]}
    assert hours == {
        "ana": pytest.approx(1 / 42, abs=0.001),
        "ben": pytest.approx(1 / 6, abs=0.002),
    }


def test_a_time_without_any_sample_is_no_report(server: Server) -> None:
    """Of the gap alone there is no history, and the exit status says so."""
    arguments = ["report", "--prometheus", server.url]
    arguments += ["--from", "2025-06-15T10:06:00", "--to", "2025-06-15T10:54:00"]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize("chunk", ["110m", "7h"])
def test_the_size_of_portions_changes_no_figure(
    server: Server, day: dict[str, Any], chunk: str
) -> None:
    """However the questions are cut, the document is the same."""
    cut = asked(server, "--chunk", chunk)

    for document in (cut, whole := dict(day)):
        del document["made_at"], document["cost"]
    assert whole == cut


def test_two_halves_are_the_whole(server: Server, day: dict[str, Any]) -> None:
    """Reports on the halves of a day add up to that of the day."""
    noon = "2025-06-15T12:00:00"
    halves = [
        asked(server, "--from", *span, whole=False)["totals"]["held_hours"]
        for span in (("2025-06-15", "--to", noon), (noon, "--to", "2025-06-16"))
    ]

    assert sum(halves) == pytest.approx(day["totals"]["held_hours"], abs=0.1)


def test_a_teams_report_is_of_its_jobs_alone(server: Server) -> None:
    """Its hours and its people; the card that it shares counts half."""
    found = asked(server, "--team", "vision")

    assert {row["user"] for row in found["people"]} == {"ana", "cho"}
    assert found["totals"]["held_hours"] == pytest.approx(27, abs=0.2)
    assert found["totals"]["card_hours"] == pytest.approx(27, abs=0.2)
    assert found["totals"]["utilization"] == 0.8  # ben's card is not theirs
    assert found["answer"][0].startswith("Team vision: 2 people held cards for 2")


def test_a_team_that_is_none_is_refused_with_those_that_are(server: Server) -> None:
    """The message lists them."""
    done = CliRunner().invoke(report, ["--prometheus", server.url, *SPAN, "--team", "visoin"])

    assert done.exit_code != 0
    assert "robotics, vision" in str(done.exception)


def test_a_server_that_does_not_answer_is_named_with_what_to_look_at() -> None:
    """Without flags the server is one on this machine, which may be none."""
    done = CliRunner().invoke(report, ["--prometheus", f"http://127.0.0.1:{free_port()}"])

    assert isinstance(done.exception, ServiceUnavailable)
    assert "is its address (--config, --prometheus) right?" in str(done.exception)


def test_a_file_that_has_the_name_of_a_form_is_taken_for_a_slip() -> None:
    """`-o` is the form with other commands; a file called `json` is nobody's wish."""
    done = CliRunner().invoke(report, ["-o", "json"])

    assert done.exit_code == 2
    assert "`-o report.json`, or `--output json" in done.output


def test_days_are_those_of_the_zone(server: Server) -> None:
    """A day of Shanghai's begins sixteen hours into one of UTC's."""
    span = ("--from", "2025-06-15T08:00:00+08:00", "--to", "2025-06-16T08:00:00+08:00")
    found = asked(server, "--zone", "Asia/Shanghai", *span, whole=False)

    assert [(day["date"], day["hours"]) for day in found["days"]] == [
        ("2025-06-15", 16.0),
        ("2025-06-16", 8.0),
    ]
    assert [day["jobs_per_card"] for day in found["days"]] == [pytest.approx(4 / 3, abs=0.01)] * 2


def test_the_half_before_is_compared_with(server: Server) -> None:
    """Each figure stands beside its former self, and differing coverage is told."""
    span = ("--from", "2025-06-15T12:00:00", "--to", "2025-06-16T00:00:00")
    found = asked(server, "--compare", "previous", *span, whole=False)

    rows = {row["figure"]: row for row in found["comparison"]}
    assert rows["held_hours"]["before"] == pytest.approx(22, abs=0.2)
    assert rows["held_hours"]["now"] == pytest.approx(34, abs=0.2)
    assert rows["idle_share"]["before"] == pytest.approx(0.5, abs=0.02)
    assert found["answer"][2].startswith("Against 15 June 2025, 00:00 to 12:00:")


def test_a_time_before_without_history_is_no_hindrance(server: Server) -> None:
    """The report is made, and says that there is nothing to compare with."""
    found = asked(server, "--compare", "previous")

    assert found["comparison"] == []
    assert any("Nothing to compare with" in text for text in found["cautions"])


def test_the_plan_asks_nothing_dear(server: Server) -> None:
    """It names every measure, where it comes from, and how much the server would go through."""
    arguments = ["--prometheus", server.url, *SPAN, "--plan", "--output", "json"]
    done = CliRunner().invoke(report, arguments)

    rows = {row["measure"]: row for row in json.loads(done.stdout)}
    assert rows["held"]["source"] == "sampled"
    assert rows["held"]["step_seconds"] == 60
    assert all(row["points"] > 0 and row["queries"] > 0 for row in rows.values())
    assert "gpu_job_holds_gpu" in rows["held"]["query"]


def test_a_server_that_is_gone_leaves_the_old_report(tmp_path: Path) -> None:
    """Nothing is written over it, and the exit status is that of a missing service."""
    file = tmp_path / "report.html"
    file.write_text("of last week")
    with pytest.raises(SystemExit) as ended:
        main(["report", "--prometheus", "http://127.0.0.1:9", "-o", str(file)])

    assert ended.value.code == 3
    assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
    assert file.read_text() == "of last week"
