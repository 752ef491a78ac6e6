"""What was applied to an engine, kept on the machine that applied it: what drift is measured by."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwarden.errors import InvalidInput, RefusedAction
from gpuwarden.scheduling.engines import By, EngineObject, Rendering

if TYPE_CHECKING:
    from gpuwarden.scheduling.policies import Engine

SCHEMA = "gpuwarden.policy-record/v1"
MAX_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Record:
    """What was applied.

    Attributes:
        rendering: the objects that were put in place, or were there already.
        at: Unix time.
        who: the user who did it.
    """

    rendering: Rendering
    at: float
    who: str


def write_record(path: Path, record: Record) -> None:
    """Keep a record in the place of an older one.

    Raises:
        RefusedAction: it cannot be written.
    """
    document = {
        "schema": SCHEMA,
        "engine": record.rendering.engine,
        "version": record.rendering.version,
        "policy": record.rendering.policy,
        "at": record.at,
        "who": record.who,
        "objects": [
            {"kind": each.kind, "name": each.name, "by": each.by, "values": dict(each.values)}
            for each in record.rendering.objects
        ],
    }
    text = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
        ) as file:
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                os.fchmod(file.fileno(), 0o644)
                Path(file.name).replace(path)
            except OSError:
                with contextlib.suppress(OSError):
                    Path(file.name).unlink()
                raise
    except OSError as error:
        raise RefusedAction(
            "record_not_kept",
            f"what was applied cannot be kept in {path} ({error.strerror}): `gpuwarden policy "
            "drift` will not know it; give another file by --record",
        ) from error


def read_record(path: Path, engine: Engine) -> Record | None:
    """What was applied last, or None where there is no record.

    Args:
        path: of the record.
        engine: that it must be of.

    Raises:
        InvalidInput: it is damaged, or of another engine.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidInput(f"{path} cannot be read: {error.strerror}") from error
    try:
        record = _decoded(json.loads(content))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(
            f"{path} is no record of what was applied; apply again, or remove it"
        ) from error
    if record.rendering.engine != engine:
        raise InvalidInput(f"{path} is a record of {record.rendering.engine}, not of {engine}")
    return record


def _decoded(document: Any) -> Record:
    if document["schema"] != SCHEMA:
        raise ValueError("another schema")
    objects = tuple(
        EngineObject(
            _text(each["kind"]),
            _text(each["name"]),
            {_text(name): _text(value) for name, value in each["values"].items()},
            "",
            By(each["by"]),
        )
        for each in document["objects"]
    )
    engine = document["engine"]
    if engine not in ("slurm", "kueue", "local"):
        raise ValueError("another engine")
    rendering = Rendering(engine, _text(document["version"]), _text(document["policy"]), objects)
    at = document["at"]
    if isinstance(at, bool) or not isinstance(at, (int, float)) or not 0 <= at < 1e12:
        raise ValueError("no time")
    return Record(rendering, float(at), _text(document["who"]))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("no text")
    return value


def remove_record(path: Path) -> None:
    """Forget what was applied; nothing to forget is no mistake."""
    with contextlib.suppress(OSError):
        path.unlink()
