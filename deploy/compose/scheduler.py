#!/usr/bin/env python3
"""Starts compose.yaml's scheduler on the simulated cards: every word goes to `gpuwarden scheduler`.

A daemon finds NVML by the dynamic linker, as on a real machine; here that is the simulated one.
"""

from __future__ import annotations

import os
import sys

from gpuwarden.exporter import simulated


def main() -> None:
    """Become the daemon; GPUWARDEN_SIMULATED_SCENARIO names the cards."""
    environment = {**os.environ, "LD_LIBRARY_PATH": str(simulated.build().parent)}
    command = [sys.executable, "-m", "gpuwarden", "scheduler", *sys.argv[1:]]
    os.execve(command[0], command, environment)  # noqa: S606 - no shell is meant


if __name__ == "__main__":
    main()
