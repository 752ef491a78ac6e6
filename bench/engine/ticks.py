"""Real ticks of a real engine in a process of its own: `python -m bench.engine.ticks URL FOLDER`.

The shipped rules, a ledger on disk, no Alertmanager, no agent: nothing can be told and nothing
ended, everything else is as in production. Prints what each tick took as one line of JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import gpuwarden.ruleengine
from bench.engine.fleets import SCRAPE_SECONDS
from gpuwarden import logs
from gpuwarden.ruleengine.records import Change
from gpuwarden.ruleengine.serving import Service, spare_the_collector
from gpuwarden.ruleengine.settings import Settings, load_settings

if TYPE_CHECKING:
    from gpuwarden.ruleengine.engine import Engine

RULES = Path(gpuwarden.ruleengine.__file__).parent / "rules"
TICK_SECONDS = 15.0
AGED_TICKS = 2
"""After each of the first ticks a day passes for all cases; then they are what they stay."""
DAY = 86400.0


def written_settings(url: str, folder: Path) -> Settings:
    """engine.yaml in a folder, for the shipped rules and a fleet of the bench."""
    path = folder / "engine.yaml"
    path.write_text(
        f"version: 1\nprometheus: {{url: {url}, timeout: 60s}}\n"
        f"scrape_interval: {SCRAPE_SECONDS}s\ntick: {TICK_SECONDS:g}s\n"
        f"rules: [{RULES}/*.yaml]\nledger: ledger.sqlite\nkill_switch: halt\n",
        encoding="utf-8",
    )
    return load_settings(path)


def cpu_seconds() -> float:
    """User and system time of this process with all its threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def memory_bytes(name: str) -> int:
    """VmRSS (now) or VmHWM (the most ever) of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(line for line in status.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _age(engine: Engine) -> None:
    """Make a day pass for every open case, so that it is detected and enters its stages."""
    changes = []
    for stored in engine.cases.all():
        case = stored.case
        older = msgspec.structs.replace(
            case, yes_for=case.yes_for + DAY, elapsed=case.elapsed + DAY
        )
        changes.append(Change(stored.id, older, "observe", (), None))
    engine.cases.save(changes, time=engine.clock.wall())


async def _run(settings: Settings, ticks: int, pause: float) -> None:
    service = Service(settings)
    spare_the_collector()
    engine = service.engine
    try:
        for number in range(ticks):
            cpu, wall = cpu_seconds(), time.perf_counter()
            await engine.tick()
            facts = engine.view.facts
            line = {
                "wall": time.perf_counter() - wall,
                "cpu": cpu_seconds() - cpu,
                "resident": memory_bytes("VmRSS"),
                "peak": memory_bytes("VmHWM"),
                "jobs": 0 if facts is None else len(facts.jobs),
                "cases": len(engine.cases),
                "outcomes": engine.ticks.outcomes,
            }
            print(json.dumps(line), flush=True)
            if number < AGED_TICKS:
                _age(engine)
            await asyncio.sleep(pause)
    finally:
        await service.aclose()


def main() -> None:
    """Run the ticks."""
    parser = argparse.ArgumentParser(prog="python -m bench.engine.ticks", description=__doc__)
    parser.add_argument("url", help="of the Prometheus")
    parser.add_argument("folder", type=Path, help="where engine.yaml and the ledger are written")
    parser.add_argument("--ticks", type=int, default=5, help="how many; 5 by default")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two ticks")
    arguments = parser.parse_args()
    logs.configure("error")
    asyncio.run(
        _run(written_settings(arguments.url, arguments.folder), arguments.ticks, arguments.pause)
    )


if __name__ == "__main__":
    main()
