"""The table of docs/operations.md: `python -m bench.agent` ends jobs in every situation.

It runs the tests of tests/exporter/agent/test_situations.py, which start real processes on a
simulated card, and prints what each of them showed. Only root can: the situations take other users,
namespaces and cgroups.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = "tests/exporter/agent/test_situations.py"
TABLE_VARIABLE = "GPUWARDEN_KILL_TABLE"
HEAD = """\
| Situation | `inspect` | `terminate` | SIGTERM / SIGKILL | Survivors | Freed | Others unharmed |
|---|---|---|---|---|---|---|
"""
_SECONDS = 600.0


def main() -> int:
    """Run the situations and print their table; gives pytest's status."""
    if os.geteuid() != 0:
        print("the situations take other users, namespaces and cgroups: run this as root")
        return 2
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder, "table.md")
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", TESTS],
            cwd=ROOT,
            env={**os.environ, TABLE_VARIABLE: str(table)},
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        if not table.exists():
            print(done.stdout, done.stderr)
            return done.returncode or 1
        print(HEAD + table.read_text(encoding="utf-8"), end="")
        if done.returncode:
            print(done.stdout)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
