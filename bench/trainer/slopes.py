"""Write the models' table: `python -m bench.trainer.slopes [--check] [NAME...]`.

Every model of ultralytics that estimates are shipped for is measured without a card, which takes
some ten minutes on one core; `--check` writes nothing and exits with 1 where a shipped row is not
what is measured now, with NAMEs only of these.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpuwarden.trainer import slopes
from gpuwarden.trainer.environments import software

TABLE = Path(__file__).parents[2] / "src/gpuwarden/estimate_models.json"
TOLERANCE = 0.005
"""Ratio; versions of torch may save an index tensor more or less."""

_SIZES = {"v8": "nsmlx", "11": "nsmlx", "12": "nsmlx", "26": "nsmlx"}
_TASKS = ("", "-seg", "-pose", "-obb", "-cls")


def names() -> list[str]:
    """Models of the table, as ultralytics names their files."""
    found = [f"yolov5{size}" for size in "nsmlx"]
    for family, sizes in _SIZES.items():
        found += [f"yolo{family}{size}{task}" for size in sizes for task in _TASKS]
    found += [f"yolov9{size}" for size in ("t", "s", "m", "c", "e", "c-seg", "e-seg")]
    found += [f"yolov10{size}" for size in "nsmblx"]
    return found


def differences(shipped: dict[str, Any], measured: dict[str, Any]) -> list[str]:
    """Fields whose values are further apart than the tolerance.

    Args:
        shipped: a row of the table.
        measured: the same row, anew.
    """
    found = []
    for field, value in measured.items():
        other = shipped.get(field)
        same = other == value
        if isinstance(value, int | float) and isinstance(other, int | float):
            same = abs(value - other) <= TOLERANCE * abs(value)
        if not same:
            found.append(f"{field} is {other}, measured {value}")
    return found


def main() -> int:
    """Measure; 0 unless a row differs."""
    parser = argparse.ArgumentParser(prog="python -m bench.trainer.slopes", description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    parser.add_argument("names", nargs="*", metavar="NAME", help="models; all by default")
    arguments = parser.parse_args()
    os.environ.setdefault("YOLO_OFFLINE", "1")
    os.environ.setdefault("YOLO_AUTOINSTALL", "0")
    os.environ.setdefault("YOLO_CONFIG_DIR", tempfile.mkdtemp(prefix="gpuwarden-slopes-"))
    table: dict[str, Any] = (
        json.loads(TABLE.read_text("utf-8")) if TABLE.exists() else {"models": {}}
    )
    wrong = 0
    for name in arguments.names or names():
        row = slopes.measure(f"{name}.yaml")
        for difference in differences(table["models"].get(name, {}), row):
            wrong += 1
            print(f"{name}: {difference}")
        print(f"{name}: {json.dumps(row)}", flush=True)
        table["models"][name] = row
    if arguments.check:
        return 1 if wrong else 0
    versions = {key: value for key, value in software().items() if key != "gpuwarden"}
    order = [name for name in names() if name in table["models"]]
    rows = ",\n".join(f'  "{name}": {json.dumps(table["models"][name])}' for name in order)
    TABLE.write_text(
        f'{{"made_with": {json.dumps(versions)},\n"models": {{\n{rows}\n}}}}\n', "utf-8"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
