"""Strict YAML with places: every mistake of a file is found in one pass, at its line and column.

`load_located` reads a file into nodes that know where they stand; `validate` checks them against a
pydantic model and turns each of its complaints into a diagnostic. Scalars follow YAML 1.2's core
schema: `no`, `on` and `1:30` are text, not False, True and 90. Nothing is converted where a model
has a plain number, truth value or `Literal`: `true` and `1.0` are not 1. Anchors are expanded
within bounds, tags and merge keys are refused.

Codes: GW100 unreadable file, GW101 syntax, GW102 duplicate key, GW103 unknown key, GW104 not one of
the allowed words, GW105 missing key, GW106 wrong type, GW107 unreadable value, GW108 refused
feature of YAML, GW109 out of range. Models raise PydanticCustomError with codes of their own.
"""

from __future__ import annotations

import re
import types
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    PlainValidator,
    Tag,
    ValidationError,
    WrapValidator,
)

from gpuwarden.diagnostics import Diagnostic, Severity, Span, did_you_mean, render_text
from gpuwarden.errors import InvalidInput
from gpuwarden.look_alikes import look_alike
from gpuwarden.yaml_mistakes import syntax_mistake

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pydantic_core import ErrorDetails

MAX_BYTES = 1024 * 1024
MAX_NODES = 50_000
"""Nodes of a file after its aliases are expanded: ten nested aliases would be a billion."""
MAX_DEPTH = 40

Step = str | int
"""One step of a path into a document: a key, or an index."""

_Model = TypeVar("_Model", bound=BaseModel)


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's reader and composer with the scalars of YAML 1.2's core schema."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own interface


_FLOAT = (
    r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)"
)
_TAG = "tag:yaml.org,2002:"
_PLAIN_SCALARS: dict[str, re.Pattern[str]] = {}
"""Tag -> what a scalar without quotes looks like that has it, in the order in which they count."""
for _name, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]{1,18}|0o[0-7]{1,18}|0x[0-9a-fA-F]{1,15}", list("-+0123456789")),
    ("float", _FLOAT, list("-+0123456789.")),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
):
    _PLAIN_SCALARS[_TAG + _name] = re.compile(rf"^(?:{_pattern})$")
    _CoreLoader.add_implicit_resolver(_TAG + _name, _PLAIN_SCALARS[_TAG + _name], _first)


@dataclass(frozen=True, slots=True)
class Node:
    """A value of the file and where it stands.

    Attributes:
        span: of the value; of a mapping or list, its start.
        value: text, number, bool or None; or a list of nodes; or a mapping of nodes.
        keys: of a mapping, where each key stands.
    """

    span: Span
    value: str | int | float | bool | list[Node] | dict[str, Node] | None
    keys: dict[str, Span] = field(default_factory=dict)

    def data(self) -> Any:
        """The value without places, as plain lists and dicts."""
        if isinstance(self.value, dict):
            return {key: item.data() for key, item in self.value.items()}
        if isinstance(self.value, list):
            return [item.data() for item in self.value]
        return self.value

    def child(self, step: Step) -> Node | None:
        """The node one step down, or None."""
        if isinstance(self.value, dict):
            return self.value.get(step) if isinstance(step, str) else None
        if isinstance(self.value, list) and isinstance(step, int) and step < len(self.value):
            return self.value[step]
        return None

    def at(self, path: Iterable[Step]) -> Node:
        """The node at a path, or the deepest one on the way that exists."""
        node = self
        for step in path:
            below = node.child(step)
            if below is None:
                return node
            node = below
        return node

    def items(self) -> Sequence[Node]:
        """The nodes of a list; empty for anything else."""
        return self.value if isinstance(self.value, list) else ()


@dataclass(frozen=True, slots=True)
class Document:
    """One file as read.

    Attributes:
        file: its name in diagnostics.
        text: its content, for the lines under diagnostics.
        root: None if it could not be read at all.
        diagnostics: what is wrong with it as YAML.
    """

    file: str
    text: str
    root: Node | None
    diagnostics: tuple[Diagnostic, ...] = ()


def load_located(source: Path | str, *, name: str | None = None) -> Document:
    """Read YAML; whatever is wrong with it is in the document's diagnostics.

    Args:
        source: a path to read, or the text itself.
        name: the file's name in diagnostics; the path by default.
    """
    if isinstance(source, str):
        return _Reading(name or "<text>", source).document()
    name = name or str(source)
    try:
        with source.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except IsADirectoryError:
        return _unreadable(name, "it is a folder: name the files in it, such as *.yaml")
    except OSError as error:
        return _unreadable(name, f"the file cannot be read: {error.strerror or error}")
    if len(content) > MAX_BYTES:
        return _unreadable(name, f"the file is larger than {MAX_BYTES // 1024} KiB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return _unreadable(name, f"the file is not UTF-8: byte {error.start} cannot be decoded")
    return _Reading(name, text).document()


def _unreadable(name: str, message: str) -> Document:
    finding = Diagnostic("GW100", Severity.ERROR, Span(name, 1, 1), message)
    return Document(name, "", None, (finding,))


class _Refused(Exception):
    """The document goes beyond a bound; there is no point in reading on."""


class _Reading:
    """One pass over one text."""

    def __init__(self, name: str, text: str) -> None:
        self._name = name
        self._text = text
        self._findings: list[Diagnostic] = []
        self._count = 0

    def document(self) -> Document:
        root = self._root()
        return Document(self._name, self._text, root, tuple(self._findings))

    def _root(self) -> Node | None:
        try:
            loader = _CoreLoader(self._text)
            try:
                node = loader.get_single_node()
            finally:
                loader.dispose()
            if node is None:
                return Node(Span(self._name, 1, 1), None)
            return self._convert(node, 0)
        except yaml.MarkedYAMLError as error:
            found = syntax_mistake(error, self._text)
            at = Span(self._name, found.line, found.column)
            self._report("GW101", at, found.message, found.hint)
        except yaml.reader.ReaderError as error:
            before = self._text[: error.position]
            column = len(before) - (before.rfind("\n") + 1) + 1
            self._report(
                "GW101",
                Span(self._name, before.count("\n") + 1, column),
                "a control character is not allowed here",
            )
        except RecursionError:
            self._report("GW108", Span(self._name, 1, 1), "the file is nested too deep")
        except _Refused:
            pass  # already reported
        return None

    def _report(self, code: str, span: Span, message: str, hint: str | None = None) -> None:
        self._findings.append(Diagnostic(code, Severity.ERROR, span, message, hint))

    def _span(self, node: yaml.Node) -> Span:
        start, end = node.start_mark, node.end_mark
        one_line = isinstance(node, yaml.ScalarNode) and start.line == end.line
        end_column = end.column + 1 if one_line and end.column > start.column else None
        return Span(self._name, start.line + 1, start.column + 1, end_column)

    def _convert(self, node: yaml.Node, depth: int) -> Node:
        span = self._span(node)
        self._count += 1
        if depth > MAX_DEPTH or self._count > MAX_NODES:
            what = "nested too deep" if depth > MAX_DEPTH else "too large once aliases are expanded"
            self._report("GW108", span, f"the file is {what}")
            raise _Refused
        if node.tag != _untagged(node):
            self._report("GW108", span, f"the tag {node.tag} is not allowed", "leave it out")
            return Node(span, None)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, span, depth)
        if isinstance(node, yaml.SequenceNode):
            return Node(span, [self._convert(item, depth + 1) for item in node.value])
        text = self._meant(str(node.value), span)
        return Node(span, None if text is None else _scalar(node.tag.rpartition(":")[2], text))

    def _meant(self, text: str, span: Span) -> str | None:
        """A text as it is meant; None, reported, where an escape in it stands for no character."""
        try:
            # JSON writes a character beyond U+FFFF as two escapes, which belong together.
            return text.encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            message = "an escape between \\ud800 and \\udfff is no character"
            self._report("GW101", span, message, "write the character itself")
            return None

    def _mapping(self, node: yaml.MappingNode, span: Span, depth: int) -> Node:
        values: dict[str, Node] = {}
        keys: dict[str, Span] = {}
        for key, value in node.value:
            at = self._span(key)
            if not isinstance(key, yaml.ScalarNode):
                self._report("GW108", at, "a key must be a plain word")
                continue
            name = self._meant(str(key.value), at)
            if name is None:
                continue
            if name in keys:
                self._report(
                    "GW102",
                    at,
                    f'"{name}" is given twice; the first is in line {keys[name].line}',
                    "remove one of them",
                )
                continue
            keys[name] = at
            values[name] = self._convert(value, depth + 1)
        return Node(span, values, keys)


def _untagged(node: yaml.Node) -> str:
    """The tag that a node has if none is written; `!!int abc` would be no number."""
    if isinstance(node, yaml.MappingNode):
        return _TAG + "map"
    if isinstance(node, yaml.SequenceNode):
        return _TAG + "seq"
    unquoted = isinstance(node, yaml.ScalarNode) and node.style is None
    looks = _PLAIN_SCALARS.items() if unquoted else ()
    return next((tag for tag, pattern in looks if pattern.match(node.value)), _TAG + "str")


def _scalar(kind: str, text: str) -> str | float | bool | None:
    match kind:
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "int":
            return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
        case "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
        case _:
            return text


# ---------------------------------------------------------------------------------------------
# Validation


def validate(
    model: type[_Model], node: Node, *, at: Sequence[Step] = ()
) -> tuple[_Model | None, list[Diagnostic]]:
    """Check a node against a model.

    Args:
        model: the pydantic model; it should refuse unknown keys.
        node: what was read.
        at: where the node stands in its document, for the paths in messages.

    Returns:
        The value and no diagnostics, or None and every error.
    """
    value: _Model | None = None
    complaints: list[Diagnostic] = []
    try:
        value = model.model_validate(node.data())
    except ValidationError as error:
        details = error.errors(include_url=False)
        complaints = [_translate(model, node, item, at) for item in details]
    said = {item.span for item in complaints}
    complaints += [
        item for item in _converted([(model, ())], node, list(at)) if item.span not in said
    ]
    return (None if complaints else value), complaints


def load_file(model: type[_Model], path: Path) -> _Model:
    """Read and check a file of one model, such as a program's settings.

    Raises:
        InvalidInput: with every mistake; its message shows each with its line.
    """
    document = load_located(path)
    value, findings = None, list(document.diagnostics)
    if document.root is not None:
        value, complaints = validate(model, document.root)
        findings += complaints
    if value is None or findings:
        raise InvalidInput(render_text(findings, {document.file: document.text}), findings)
    return value


def path_text(path: Iterable[Step]) -> str:
    """Write a path as people do: `rules[0].stages[2].grace`."""
    text = ""
    for step in path:
        text += f"[{step}]" if isinstance(step, int) else f".{step}"
    return text.removeprefix(".")


@dataclass(frozen=True, slots=True)
class _Finding:
    """What one complaint of pydantic comes to."""

    code: str
    message: str
    hint: str | None = None


def _translate(
    model: type[BaseModel], root: Node, detail: ErrorDetails, prefix: Sequence[Step]
) -> Diagnostic:
    context: Mapping[str, Any] = detail.get("ctx") or {}
    loc = [*detail["loc"], *context.get("at", ())]
    about_key = bool(loc) and loc[-1] == "[key]"
    path, node, parent = _walk(root, loc[:-1] if about_key else loc)
    kind = detail["type"]
    span = node.span
    if kind == "missing":
        path = [*path, *(step for step in loc[-1:] if not path or path[-1] != step)]
    elif (about_key or kind == "extra_forbidden") and parent is not None and path:
        span = parent.keys.get(str(path[-1]), span)
    finding = _finding(model, detail, context)
    if about_key and finding.code == "GW104":
        finding = _Finding("GW103", finding.message, finding.hint)
    place = path_text([*prefix, *path])
    message = f"{place}: {finding.message}" if place else finding.message
    word = path[-1] if path and (about_key or kind == "extra_forbidden") else node.value
    odd = look_alike(word) if isinstance(word, str) else None
    return Diagnostic(finding.code, Severity.ERROR, span, message, odd or finding.hint)


def _walk(root: Node, loc: Sequence[Step]) -> tuple[list[Step], Node, Node | None]:
    """Follow pydantic's location; steps that are no part of the file (tags of unions) are left out.

    Returns:
        The steps taken, the node reached, and its parent.
    """
    path: list[Step] = []
    node, parent = root, None
    for step in loc:
        below = node.child(step)
        if below is None:
            continue
        path.append(step)
        node, parent = below, node
    return path, node, parent


_TYPES = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "mapping_type": "a mapping",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
}

_RANGES = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def _finding(model: type[BaseModel], detail: ErrorDetails, context: Mapping[str, Any]) -> _Finding:
    kind = detail["type"]
    if re.fullmatch(r"GW[0-9]{3}", kind):
        word, known = context.get("word"), context.get("known", ())
        hint = context.get("hint") or (did_you_mean(word, known) if word else None)
        return _Finding(kind, detail["msg"], hint)
    if kind == "extra_forbidden":
        known_keys = _known_keys(model, detail["loc"][:-1])
        hint = did_you_mean(str(detail["loc"][-1]), known_keys) or _listing(known_keys)
        return _Finding("GW103", "this key is not known here", hint)
    if kind in ("model_type", "model_attributes_type"):
        keys = _known_keys(model, detail["loc"])
        hint = f"its keys are {', '.join(keys)}" if keys else None
        return _Finding("GW106", f"must be a mapping, not {_shown(detail['input'])}", hint)
    if kind in ("enum", "literal_error"):
        return _not_allowed(detail["input"], str(context.get("expected", "")))
    return _plain_finding(kind, detail, context)


def _plain_finding(kind: str, detail: ErrorDetails, context: Mapping[str, Any]) -> _Finding:
    """Complaints that need nothing but their own words."""
    given = detail["input"]
    code, message, hint = "GW106", detail["msg"], None
    if kind == "missing":
        code, message = "GW105", "is missing"
    elif kind == "value_error":
        code, message = "GW107", str(context["error"])
    elif kind in _TYPES:
        message = f"must be {_TYPES[kind]}, not {_shown(given)}"
        if kind == "string_type" and isinstance(given, (bool, int, float)):
            hint = "put it in quotes"
        elif kind in ("list_type", "tuple_type") and isinstance(given, str):
            hint = f"write [{given}]"
    elif kind in _RANGES:
        words, bound = _RANGES[kind]
        code, message = "GW109", f"must be {words} {context[bound]:g}"
    elif kind == "string_pattern_mismatch":
        code, message = "GW107", f"{_shown(given)} does not match {context['pattern']}"
    elif kind == "string_too_short":
        code, message = "GW107", "must not be empty"
    return _Finding(code, message, hint)


def _not_allowed(given: object, expected: str) -> _Finding:
    allowed = re.findall(r"'([^']*)'|(?<![\w'])(\d+)", expected)
    words = [quoted or number for quoted, number in allowed]
    hint = did_you_mean(given, words) if isinstance(given, str) else None
    if given in [number for _, number in allowed if number]:
        hint = "write it without quotes"
    return _Finding("GW104", f"{_shown(given)} is none of {', '.join(words)}", hint)


def _shown(value: object) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, (list, tuple)):
        return "a list"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _listing(known: Sequence[str]) -> str | None:
    return f"known are {', '.join(sorted(known))}" if known else None


# -- following a model's annotations

_Wanted = tuple[Any, tuple[Any, ...]]
"""An annotation, and what pydantic keeps beside it."""
_PLAIN: dict[Any, str] = {bool: "true or false", int: "a whole number", float: "a number"}
_TAKEN: dict[type, tuple[Any, ...]] = {bool: (bool,), int: (int, float), float: (float,), str: ()}
"""Type of a scalar -> the plain types that it is one of."""


def _converted(wanted: Sequence[_Wanted], node: Node, path: Sequence[Step]) -> Iterator[Diagnostic]:
    """Scalars that pydantic takes for what they are not: `true` for 1, `1.0` for 1, "5" for 5."""
    below: Iterable[tuple[Step, Node]] = ()
    if isinstance(node.value, dict):
        below = node.value.items()
    elif isinstance(node.value, list):
        below = enumerate(node.value)
    for step, item in below:
        inner = [found for each in wanted for found in _inside(each, step)]
        yield from _converted(inner, item, [*path, step])
    leaves = [leaf for each in wanted for leaf in _flat(each)]
    finding = _misread(node.value, [leaf for leaf in leaves if leaf[0] is not type(None)])
    if finding is not None:
        message = f"{path_text(path)}: {finding.message}" if path else finding.message
        yield Diagnostic(finding.code, Severity.ERROR, node.span, message, finding.hint)


def _misread(value: object, leaves: Sequence[_Wanted]) -> _Finding | None:
    """What is wrong with a scalar, if every type that is wanted here is a plain one."""
    if type(value) not in _TAKEN or not leaves:
        return None
    options: list[Any] = []
    plain: list[Any] = []
    for annotation, beside in leaves:
        own = any(isinstance(b, (BeforeValidator, PlainValidator, WrapValidator)) for b in beside)
        if own:
            return None
        if _origin(annotation) is Literal:
            options += get_args(annotation)
        elif annotation in _PLAIN:
            plain.append(annotation)
        else:
            return None
    named = any(option == value and type(option) is type(value) for option in options)
    if named or set(plain) & set(_TAKEN[type(value)]):
        return None
    if options:
        return _not_allowed(value, ", ".join(repr(option) for option in options))
    words = " or ".join(_PLAIN[kind] for kind in dict.fromkeys(plain))
    return _Finding("GW106", f"must be {words}, not {_shown(value)}")


def _flat(wanted: _Wanted) -> Iterator[_Wanted]:
    """An annotation without `Annotated` and unions around it."""
    annotation, beside = wanted
    origin, arguments = _origin(annotation), get_args(annotation)
    if origin is Annotated:
        yield from _flat((arguments[0], (*beside, *arguments[1:])))
    elif origin in (Union, types.UnionType):
        for member in arguments:
            yield from _flat((member, beside))
    else:
        yield annotation, beside


def _origin(annotation: Any) -> Any:
    return get_origin(annotation)


def _inside(wanted: _Wanted, step: Step) -> Iterator[_Wanted]:
    """What is wanted one step down."""
    for annotation, _ in _flat(wanted):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            for name, info in annotation.model_fields.items():
                if step == (info.alias or name):
                    yield info.annotation, tuple(info.metadata)
        elif arguments := get_args(annotation):
            yield arguments[1 if isinstance(step, str) and len(arguments) > 1 else 0], ()


def _known_keys(model: type[BaseModel], loc: Sequence[Step]) -> list[str]:
    """Keys of the model at a location of pydantic's, in which tags of unions are steps as well."""
    found: list[_Wanted] = [(model, ())]
    for step in loc:
        tagged = [each for each in found if Tag(str(step)) in each[1]]
        below = tagged or [item for each in found for item in _inside(each, step)]
        found = [leaf for each in below for leaf in _flat(each)]
    return [
        info.alias or name
        for annotation, _ in found
        if isinstance(annotation, type) and issubclass(annotation, BaseModel)
        for name, info in annotation.model_fields.items()
    ]
