"""Write the boards: `python -m grafana.build`; with `--check`, only say whether they drifted."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import RowPanel

from grafana import fleet, governance, job, node, scheduling

if TYPE_CHECKING:
    from collections.abc import Iterator

FOLDER = Path(__file__).parent / "dashboards"
BOARDS = (fleet.board, node.board, job.board, governance.board, scheduling.board)


def rendered() -> dict[Path, str]:
    """Path -> JSON of every board, keys sorted so that a change reads as what it is."""
    encoder = JSONEncoder(sort_keys=True, indent=2, ensure_ascii=False)
    found = {}
    for build in BOARDS:
        board = build().build()
        for number, panel in enumerate(_with_folded(board.panels or []), 1):
            # Links and alerts refer to panels by number: given here, or Grafana would choose them.
            panel.id_val = number
        found[FOLDER / f"{board.uid}.json"] = encoder.encode(board) + "\n"
    return found


def _with_folded(panels: list[Any]) -> Iterator[Any]:
    """Every panel, and behind a folded heading those under it."""
    for panel in panels:
        yield panel
        if isinstance(panel, RowPanel):
            yield from panel.panels


def drifted() -> list[Path]:
    """Boards on disk that are not what the code builds, and files that no code builds."""
    boards = rendered()
    wrong = [path for path, text in boards.items() if not path.exists() or path.read_text() != text]
    return sorted({*wrong, *(set(FOLDER.glob("*.json")) - set(boards))})


def main() -> None:
    """Write every board, or exit 1 if one has drifted."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 on a difference"
    )
    if parser.parse_args().check:
        for path in drifted():
            print(f"{path.name} is not what the code builds: run python -m grafana.build")
        sys.exit(1 if drifted() else 0)
    FOLDER.mkdir(exist_ok=True)
    for path, text in rendered().items():
        path.write_text(text)
        print(path)


if __name__ == "__main__":
    main()
