"""One attack of `bench.fuzz`, led by coverage, as a process of its own.

`python -m bench.fuzz.led NAME [options of libFuzzer]`; what is imported here is instrumented.
"""

from __future__ import annotations

import importlib
import logging
import sys

import structlog


def main() -> None:
    """Attack until libFuzzer ends the process."""
    atheris = importlib.import_module("atheris")
    with atheris.instrument_imports(include=["gpuwarden"]):
        targets = importlib.import_module("bench.fuzz.targets")
        edges = importlib.import_module("bench.fuzz.edges")
    logging.disable()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    attack = next(item for item in targets.TARGETS if item.name == sys.argv[1])
    with edges.prepared(attack) as run:
        atheris.Setup([sys.argv[0], *sys.argv[2:]], run)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
