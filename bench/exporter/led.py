"""One attack of `bench.exporter.hostile`, led by coverage, as a process of its own.

`python -m bench.exporter.led NAME [options of libFuzzer]`; what is imported here is instrumented.
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
        attacks = importlib.import_module("bench.exporter.attacks")
    logging.disable()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    attack = next(item for item in attacks.ATTACKS if item.name == sys.argv[1])
    with attacks.prepared(attack) as run:
        atheris.Setup([sys.argv[0], *sys.argv[2:]], run)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
