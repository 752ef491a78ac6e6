"""Attack every parser of what others write: `make fuzz FOR=60`, `python -m bench.fuzz --for 60`.

Each edge (job files, command lines, /proc, answers of drivers, schedulers and servers, requests,
rule files, states: `--list`) is given inputs made from right ones. Where atheris is installed,
coverage leads the way into the edges that are pure; the others, and all of them without it, are
mutated blindly. Prints how many inputs were tried and what was found; exits with 1 where there is a
fault, and keeps the input that led to it under --keep.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from bench.fuzz.edges import Attack, prepared
from bench.fuzz.mutations import MAX_INPUT, Mutations
from bench.fuzz.results import Result, keep
from bench.fuzz.targets import TARGETS
from bench.fuzz.web_edges import REQUESTS, attack_web

if TYPE_CHECKING:
    from collections.abc import Callable

SLOW = 4
"""How much more of the time those have that read /proc, ask a driver or a server."""
_RUNS = re.compile(r"stat::number_of_executed_units:\s*([0-9]+)")
_FAULT = re.compile(r"^(\w[\w.]*(?:Error|Exception|Interrupt|Unavailable|Lost)\b.*)$", re.MULTILINE)
KEEP = Path(".fuzz")


def _mutate(attack: Attack, seconds: float, *, seed: int, kept: Path) -> Result:
    """Try one edge blindly for a while."""
    result = Result(attack.name, "mutated")
    mutations = Mutations(attack.seeds, attack.words, random.Random(seed))  # noqa: S311 (no secret)
    began = time.monotonic()
    with prepared(attack) as run:
        while (spent := time.monotonic() - began) < seconds:
            first = result.inputs < len(attack.seeds)
            data = attack.seeds[result.inputs] if first else mutations.next()
            result.inputs += 1
            fault = _fault(run, data)
            if fault:
                result.faults[fault] += 1
                if result.faults[fault] == 1:
                    path = keep(kept, attack.name, data)
                    print(f"{attack.name}: {fault} by {path}", flush=True)
        result.seconds = spent
    return result


def _fault(run: Callable[[bytes], None], data: bytes) -> str:
    """What went wrong with an input, and where; empty where nothing did."""
    try:
        run(data)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # noqa: BLE001 (also a panic in Rust, which is no Exception)
        frames = [
            frame
            for frame in traceback.extract_tb(error.__traceback__)
            if "/bench/fuzz/" not in frame.filename
        ]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} " if frames else ""
        return f"{where}{type(error).__name__}: {error}"[:300]
    return ""


def _led(attack: Attack, seconds: float, *, seed: int, kept: Path) -> Result:
    """Try one edge, led by coverage, in a process of its own: the first fault ends it."""
    result = Result(attack.name, "led by coverage", seconds=seconds)
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fuzz-corpus-") as corpus:
        for number, content in enumerate(attack.seeds):
            Path(corpus, str(number)).write_bytes(content)
        words = Path(corpus, "words")
        lines = ['"' + "".join(f"\\x{byte:02x}" for byte in word) + '"' for word in attack.words]
        words.write_text("\n".join(lines))
        command = [sys.executable, "-m", "bench.fuzz.led", attack.name]
        command += [f"-max_total_time={int(seconds) or 1}", f"-max_len={MAX_INPUT}"]
        command += [
            f"-seed={seed}",
            "-print_final_stats=1",
            "-timeout=10",
            f"-dict={words}",
            f"-artifact_prefix={kept.resolve()}/{attack.name.replace(' ', '-')}-",
            corpus,
        ]
        try:
            answer = subprocess.run(
                command,
                check=False,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds + 120,
                cwd=Path(__file__).parents[2],
            )
        except subprocess.TimeoutExpired:
            result.faults["an input that takes for ever"] += 1
            return result
    runs = _RUNS.search(answer.stderr)
    result.inputs = int(runs[1]) if runs else 0
    if answer.returncode:
        text = answer.stdout + answer.stderr
        found = _FAULT.findall(text)
        result.faults[found[0] if found else f"ended with {answer.returncode}"] += 1
        print(f"{attack.name}: {text[-3000:]}", flush=True)
    return result


def _run(attack: Attack, seconds: float, *, seed: int, led: bool, kept: Path) -> Result:
    if attack is REQUESTS:
        return attack_web(seconds, seed)
    way = _led if led and attack.pure else _mutate
    return way(attack, seconds, seed=seed, kept=kept)


def _again(attack: Attack, path: Path) -> int:
    """Try an input that was kept."""
    with prepared(attack) as run:
        run(path.read_bytes())
    print(f"{attack.name}: nothing goes wrong with {path} any more")
    return 0


def main() -> int:
    """Run the attacks and print what came of them; 1 where a fault was found."""
    every = (*TARGETS, REQUESTS)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--for", dest="seconds", type=float, default=60.0, help="of all together")
    parser.add_argument("--only", choices=[attack.name for attack in every], help="one edge")
    parser.add_argument("--of", choices=sorted({attack.of for attack in every}), help="one program")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)))
    parser.add_argument("--blind", action="store_true", help="without coverage")
    parser.add_argument("--keep", type=Path, default=KEEP, help="folder of what was a fault")
    parser.add_argument("--again", type=Path, help="try only this kept input, of the edge --only")
    parser.add_argument("--list", action="store_true", help="name the edges, and end")
    given = parser.parse_args()
    logging.disable()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    attacks = [
        item for item in every if given.only in (None, item.name) and given.of in (None, item.of)
    ]
    if given.list:
        print("\n".join(f"{item.of:10} {item.name}" for item in attacks))
        return 0
    if given.again is not None:
        if len(attacks) != 1:
            parser.error("--again needs --only EDGE")
        return _again(attacks[0], given.again)
    led = not given.blind and importlib.util.find_spec("atheris") is not None
    print(f"seed {given.seed}, {'atheris' if led else 'no atheris'}")
    results = []
    for attack in attacks:
        share = (1 if attack.pure else SLOW) / sum(1 if item.pure else SLOW for item in attacks)
        result = _run(attack, given.seconds * share, seed=given.seed, led=led, kept=given.keep)
        results.append(result)
        print(
            f"{result.name:26} {result.inputs:>10,} inputs {result.seconds:7.0f} s "
            f"{len(result.faults):>3} faults  {result.way}",
            flush=True,
        )
    for result in results:
        for fault, times in result.faults.items():
            print(f"{result.name}: {times} x {fault}")
    print(f"{sum(result.inputs for result in results):,} inputs in all")
    return 1 if any(result.faults for result in results) else 0


if __name__ == "__main__":
    raise SystemExit(main())
