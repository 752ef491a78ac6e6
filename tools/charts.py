"""Render, check and pack the Helm chart by Helm's own code, as a library: no helm binary needed.

    python tools/charts.py render --values my.yaml     # what would be sent, as one YAML stream
    python tools/charts.py lint
    python tools/charts.py package --out dist

A process of its own: the library brings Go's runtime along, with its threads and signal handlers.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import helm_python as helm
import yaml

if TYPE_CHECKING:
    from collections.abc import Sequence

CHART = Path(__file__).resolve().parent.parent / "deploy" / "helm" / "gpuwarden"
WARNING = 2
"""Of Helm's severities: 1 is a remark, 3 an error."""


def merged(files: Sequence[Path]) -> dict[str, Any]:
    """Values of several files; the later ones win, key by key."""
    values: dict[str, Any] = {}
    for path in files:
        _merge(values, yaml.safe_load(path.read_text("utf-8")) or {})
    return values


def _merge(into: dict[str, Any], more: dict[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def render(values: dict[str, Any], *, name: str, namespace: str) -> str:
    """Every object as YAML, in the order of the templates; NOTES.txt as a comment at the end.

    Raises:
        helm.HelmError: the values do not meet the schema, or a template refuses them.
    """
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        found = chart.render(values, name=name, namespace=namespace)
    texts, notes = [], ""
    for path, text in sorted(found.items()):
        if path.endswith("NOTES.txt"):
            notes = "".join(f"# {line}".rstrip() + "\n" for line in text.strip().splitlines())
        elif not path.endswith(".tpl") and text.strip():
            texts.append(text.strip())
    return "\n---\n".join(texts) + f"\n{notes}"


def lint(values: dict[str, Any]) -> list[str]:
    """What Helm's strict linter has to say that is more than a remark."""
    report = helm.lint(str(CHART), values, strict=True)
    return [
        *report["errors"],
        *(
            f"{message['path']}: {message['error']}"
            for message in report["messages"]
            if message["severity"] >= WARNING
        ),
    ]


def main() -> int:
    """Do what is asked; status 1 where Helm objects."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("deed", choices=["render", "lint", "package"])
    parser.add_argument("--values", type=Path, action="append", default=[], help="a file of values")
    parser.add_argument("--name", default="gpuwarden", help="of the release")
    parser.add_argument("--namespace", default="gpuwarden")
    parser.add_argument("--out", type=Path, default=Path("dist"), help="folder for the package")
    options = parser.parse_args()
    values = merged(options.values)
    try:
        match options.deed:
            case "render":
                text = render(values, name=options.name, namespace=options.namespace)
                sys.stdout.write(text)
            case "lint":
                findings = lint(values)
                sys.stderr.write("".join(f"{finding}\n" for finding in findings))
                return 1 if findings else 0
            case _:
                options.out.mkdir(parents=True, exist_ok=True)
                with helm.Chart.load(str(CHART)) as chart:
                    sys.stdout.write(f"{chart.save(str(options.out))}\n")
    except helm.HelmError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
