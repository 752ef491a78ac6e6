"""Strict YAML finds every mistake of a file in one pass, at its line and column."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, StrictInt, model_validator
from pydantic_core import PydanticCustomError

from gpuwarden.errors import InvalidInput
from gpuwarden.yaml_files import load_file, load_located, path_text, validate

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.diagnostics import Diagnostic


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Colour(StrEnum):
    RED = "red"
    GREEN = "green"


class _Item(_Strict):
    name: Annotated[str, Field(pattern="^[a-z]+$")]
    count: Annotated[StrictInt, Field(ge=1)] = 1
    colour: _Colour = _Colour.RED

    @model_validator(mode="after")
    def _no_green_zebra(self) -> _Item:
        if self.name == "zebra" and self.colour is _Colour.GREEN:
            raise PydanticCustomError("GW299", "a zebra is not green", {"at": ("colour",)})
        return self


class _Box(_Strict):
    label: str
    items: list[_Item] = []
    limits: dict[str, int] = {}
    format: Literal[1, 2] = 1
    share: float | None = None
    open: bool = False
    note: int | str = 0


UNSEEN = "which does not show: write it anew"


def _found(text: str) -> list[tuple[str, int, int]]:
    document = load_located(text, name="box.yaml")
    findings = list(document.diagnostics)
    if document.root is not None:
        findings += validate(_Box, document.root)[1]
    return sorted((item.code, item.span.line, item.span.column) for item in findings)


def _only(text: str) -> Diagnostic:
    document = load_located(text, name="box.yaml")
    findings = list(document.diagnostics)
    if document.root is not None:
        findings += validate(_Box, document.root)[1]
    (finding,) = findings
    return finding


def test_a_good_file_gives_its_model() -> None:
    """Defaults included."""
    document = load_located("label: a\nitems:\n- {name: ape, count: 3}\n")
    assert document.root is not None
    value, findings = validate(_Box, document.root)
    assert not findings
    assert value == _Box(label="a", items=[_Item(name="ape", count=3)])


def test_all_mistakes_are_found_in_one_pass() -> None:
    """Duplicate key, unknown key, wrong word, wrong type, out of range, missing key."""
    text = (
        "label: 3\n"
        "label: b\n"
        "itms: []\n"
        "items:\n"
        "- {name: ape, colour: gren}\n"
        "- {count: 0, name: APE}\n"
        "- count: 2\n"
    )
    assert _found(text) == [
        ("GW102", 2, 1),
        ("GW103", 3, 1),
        ("GW104", 5, 23),
        ("GW105", 7, 3),
        ("GW106", 1, 8),
        ("GW107", 6, 20),
        ("GW109", 6, 11),
    ]


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("labl: a\nlabel: b", "labl: this key is not known here", 'did you mean "label"?'),
        (
            "label: a\nitems: [{name: ape, colr: red}]",
            "items[0].colr: this key is not known here",
            'did you mean "colour"?',
        ),
        (
            "label: a\nitems: [{name: ape, colour: gren}]",
            'items[0].colour: "gren" is none of red, green',
            'did you mean "green"?',
        ),
        (
            "label: a\nxyz: 1",
            "xyz: this key is not known here",
            "known are format, items, label, limits, note, open, share",
        ),
        ("items: []", "label: is missing", None),
        ("label:", "label: must be text, not nothing", None),
        ("label: a\nitems: 3", "items: must be a list, not 3", None),
        (
            "label: a\nitems: [true]",
            "items[0]: must be a mapping, not true",
            "its keys are name, count, colour",
        ),
        ("label: 3", "label: must be text, not 3", "put it in quotes"),
        ("label: a\nformat: '1'", 'format: "1" is none of 1, 2', "write it without quotes"),
    ],
)
def test_a_message_names_the_field_and_the_remedy(
    text: str, message: str, hint: str | None
) -> None:
    """What is wrong, where, and what was probably meant."""
    finding = _only(text)
    assert (finding.message, finding.hint) == (message, hint)


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("format: true", "GW104", "format: true is none of 1, 2"),
        ("format: 1.0", "GW104", "format: 1.0 is none of 1, 2"),
        ("limits: {a: true}", "GW106", "limits.a: must be a whole number, not true"),
        ("limits: {a: 5.0}", "GW106", "limits.a: must be a whole number, not 5.0"),
        ("limits: {a: '5'}", "GW106", 'limits.a: must be a whole number, not "5"'),
        ("share: false", "GW106", "share: must be a number, not false"),
        ("open: 1", "GW106", "open: must be true or false, not 1"),
        ("open: yes", "GW106", 'open: must be true or false, not "yes"'),
        ("items: [{name: ape, count: true}]", "GW106", "items[0].count: must be a whole number"),
    ],
)
def test_nothing_is_taken_for_what_it_is_not(text: str, code: str, message: str) -> None:
    """Python has True == 1 == 1.0; who writes `version: true` did not mean version 1."""
    finding = _only(f"label: a\n{text}\n")
    assert finding.code == code
    assert finding.message.startswith(message)


@pytest.mark.parametrize(
    "text",
    ["format: 2", "share: 1", "share: 0.5", "share: ~", "open: true", "note: x", "note: 3"],
)
def test_what_is_of_the_right_type_passes(text: str) -> None:
    """A whole number is a number, and a union takes each of its types."""
    assert _found(f"label: a\n{text}\n") == []


def test_a_wrong_type_is_found_beside_other_mistakes() -> None:
    """In the same pass, and once."""
    assert _found("labl: a\nformat: true\nlimits: {a: x, b: true}\n") == [
        ("GW103", 1, 1),
        ("GW104", 2, 9),
        ("GW105", 1, 1),
        ("GW106", 3, 13),
        ("GW106", 3, 19),
    ]


def test_a_models_own_rule_keeps_its_code_and_points_at_the_field() -> None:
    """The place that the model names, not the mapping's start."""
    finding = _only("label: a\nitems:\n- {name: zebra, colour: green}\n")
    assert (finding.code, finding.span.line, finding.span.column) == ("GW299", 3, 25)
    assert finding.span.end_column == 30


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("1:30", "1:30"),
        ("010", 10),
        ("0o10", 8),
        ("0x10", 16),
        ("1e3", 1000.0),
        ("-1.5", -1.5),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("+.Inf", math.inf),
        ("true", True),
        ("~", None),
        ("", None),
        ("2027-06-30", "2027-06-30"),
        ("1_000", "1_000"),
        ("'5'", "5"),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    """YAML 1.1 reads `no` as false and `1:30` as ninety."""
    document = load_located(f"a: {text}")
    assert document.root is not None
    data = document.root.data()["a"]
    assert (data, type(data)) == (value, type(value))


@pytest.mark.parametrize("text", [".nan", ".NaN", ".NAN"])
def test_every_spelling_of_nan_is_read(text: str) -> None:
    """What a limit cannot be is said by the model, not by a traceback."""
    document = load_located(f"a: {text}")
    assert document.root is not None
    assert math.isnan(document.root.data()["a"])


@pytest.mark.parametrize(
    ("text", "code", "line", "column"),
    [
        ("a: [1", "GW101", 1, 6),
        ("a: 1\n b: 2", "GW101", 2, 3),
        ("a: \x01", "GW101", 1, 4),
        ("a: 1\n---\nb: 2", "GW101", 2, 1),
        ("a: !!python/object:os.system x", "GW108", 1, 4),
        ("a: !!int abc", "GW108", 1, 4),
        ("a: !!float x", "GW108", 1, 4),
        ("a: !!bool maybe", "GW108", 1, 4),
        ("a: !!str 5", "GW108", 1, 4),
        ("a: !!map [b]", "GW108", 1, 4),
        ("? [a]\n: 1", "GW108", 1, 3),
        ("a: &x [*x]", "GW108", 1, 4),
        ("[" * 3000, "GW108", 1, 1),
    ],
)
def test_what_is_not_plain_yaml_is_refused_with_its_place(
    text: str, code: str, line: int, column: int
) -> None:
    """Nothing that a file can contain ends in a traceback."""
    first = load_located(text, name="x").diagnostics[0]
    assert (first.code, first.span.line, first.span.column) == (code, line, column)


def test_a_tab_is_answered_with_what_to_write() -> None:
    """The commonest mistake of all, and invisible."""
    (finding,) = load_located("a:\n\tb: 1\n").diagnostics
    assert (finding.code, finding.hint) == ("GW101", "indent with spaces")


@pytest.mark.parametrize(
    ("text", "line", "hint"),
    [
        ("x: 0\na:1\nb: 2\n", 2, "write a space after the colon"),
        ("- x: 0\n  a:1\n  b: 2\n", 2, "write a space after the colon"),
        ("a:1\nb: 2\n", 2, "in the line before, write a space after the colon"),
        ("a:\t1\n", 1, "write spaces, not tabs"),
        ("a: one: two\n", 1, "put a text that holds a colon and a space in quotes"),
        ("x: 0\na\uff1a 1\nb: 2\n", 2, "\uff1a is FULLWIDTH COLON: write :"),
        ("a\uff1a 1\nb: 2\n", 2, "in the line before, \uff1a is FULLWIDTH COLON: write :"),
        ("x: 0\na:\u00a01\nb: 2\n", 2, f"it holds NO-BREAK SPACE, {UNSEEN}"),
        ("- x: 0\n\u00a0\u00a0b: 2\n", 2, f"it holds NO-BREAK SPACE, {UNSEEN}"),
    ],
)
def test_a_mistake_of_syntax_is_shown_where_it_was_made_and_named(
    text: str, line: int, hint: str
) -> None:
    """The parser misses a colon at the next key, and shows what does not show."""
    (finding,) = load_located(text).diagnostics
    assert (finding.code, finding.span.line, finding.hint) == ("GW101", line, hint)


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("label: a\nit\u0435ms: []\n", "\u0435 is CYRILLIC SMALL LETTER IE: write e"),
        (
            "label: a\nitems\u200b: []\n",
            f"it holds ZERO WIDTH SPACE, {UNSEEN}",
        ),
        (
            "label: a\nitems: [{name: x, colour: r\u0435d}]\n",
            "\u0435 is CYRILLIC SMALL LETTER IE: write e",
        ),
        (
            "label: a\nitems: [{name: \u201cx\u201d}]\n",
            '\u201c is LEFT DOUBLE QUOTATION MARK: write "',
        ),
        ("label: a\nshare: \uff15\n", "\uff15 is FULLWIDTH DIGIT FIVE: write 5"),
        ("label: a\nitems: [{name: x, colour: \u7ea2}]\n", None),
    ],
)
def test_a_character_that_looks_like_another_is_named(text: str, hint: str | None) -> None:
    """A message that shows the word as it is shows what seems to be right."""
    assert _only(text).hint == hint


def test_an_escape_that_is_no_character_is_refused() -> None:
    """Such a text can be neither hashed nor sent; what JSON writes in two halves is one."""
    found = load_located('a: "x \\ud800"\n"\\udfff": 1\nb: "\\ud83d\\ude00"\n')
    assert [(item.code, item.span.line) for item in found.diagnostics] == [
        ("GW101", 1),
        ("GW101", 2),
    ]
    assert found.root is not None
    assert found.root.data() == {"a": None, "b": "\U0001f600"}


def test_aliases_are_expanded_within_bounds() -> None:
    """Nine lines of nested aliases would be a billion nodes."""
    fine = load_located("a: &a {x: 1}\nb: *a\n")
    assert fine.root is not None
    assert fine.root.data() == {"a": {"x": 1}, "b": {"x": 1}}
    lines = ["a: &a [" + "x," * 10 + "]"]
    for name, before in zip("bcdefghi", "abcdefgh", strict=True):
        lines.append(f"{name}: &{name} [" + f"*{before}," * 10 + "]")
    bomb = load_located("\n".join(lines))
    assert bomb.root is None
    assert "too large" in bomb.diagnostics[0].message


def test_a_merge_key_is_an_unknown_key() -> None:
    """YAML 1.2 has none; it must not bring values in from elsewhere."""
    assert ("GW103", 2, 1) in _found("label: a\n<<: {items: []}\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff\xfe", "the file is not UTF-8: byte 0 cannot be decoded"),
        (b"#" * (1024 * 1024 + 1), "the file is larger than 1024 KiB"),
        (None, "the file cannot be read: No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(
    tmp_path: Path, content: bytes | None, message: str
) -> None:
    """One finding at the file's start."""
    path = tmp_path / "x.yaml"
    if content is not None:
        path.write_bytes(content)
    document = load_located(path)
    assert document.root is None
    assert [item.message for item in document.diagnostics] == [message]


def test_an_empty_file_is_not_a_mapping() -> None:
    """It is YAML, but no settings."""
    assert _only("# nothing\n").message == "must be a mapping, not nothing"


def test_load_file_raises_with_every_line_shown(tmp_path: Path) -> None:
    """What a daemon prints when it does not start."""
    path = tmp_path / "box.yaml"
    path.write_text("label: 1\nitems: x\n")
    with pytest.raises(InvalidInput) as caught:
        load_file(_Box, path)
    assert len(caught.value.diagnostics) == 2
    assert f"{path}:1:8: error[GW106]: label: must be text, not 1" in str(caught.value)
    assert "^" in str(caught.value)
    path.write_text("label: one\n")
    assert load_file(_Box, path).label == "one"


def test_a_path_is_written_as_people_do() -> None:
    """Indexes in brackets."""
    assert path_text(["rules", 0, "stages", 2, "grace"]) == "rules[0].stages[2].grace"
