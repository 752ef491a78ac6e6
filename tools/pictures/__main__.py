"""Remake pictures: `python -m tools.pictures`, or only some: `python -m tools.pictures boards`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from tools.pictures import boards, notices, pages, reports, terminals
from tools.pictures.albums import FOLDER, Album

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine


KINDS: dict[str, Callable[[Album], Coroutine[Any, Any, None]]] = {
    "boards": boards.take,
    "pages": pages.take,
    "notices": notices.take,
    "report": reports.take,
    "top": terminals.take,
}


def main() -> None:
    """Remake the pictures that are asked for, and say which files they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "kinds", nargs="*", metavar="KIND", help=f"what to picture: {', '.join(KINDS)}; all if none"
    )
    parser.add_argument("--to", type=Path, default=FOLDER, help="folder, docs/pictures by default")
    parser.add_argument(
        "--serve",
        action="store_true",
        help="picture nothing: serve the boards over the generated day until Ctrl-C",
    )
    parser.add_argument("--port", type=int, default=0, help="for --serve; a free one by default")
    given = parser.parse_args()
    unknown = sorted(set(given.kinds) - set(KINDS))
    if unknown:
        parser.error(f"no pictures of {', '.join(unknown)}: there are {', '.join(KINDS)}")
    if given.serve:
        serve(given.port)
        return
    # what an engine says of its work is no news here
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    album = Album(given.to)
    for kind in given.kinds or KINDS:
        before = len(album.made)
        asyncio.run(KINDS[kind](album))
        for path in album.made[before:]:
            sys.stdout.write(f"{path} {path.stat().st_size // 1000} kB\n")
            sys.stdout.flush()


def serve(port: int) -> None:
    """Show the boards to a browser until Ctrl-C."""
    with boards.served(port) as url:
        sys.stdout.write("".join(f"{one}\n" for one in boards.addresses(url)))
        sys.stdout.flush()
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            sys.stdout.write("stopped\n")


if __name__ == "__main__":
    main()
