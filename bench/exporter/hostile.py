"""Attack the exporter's outer edges: `python -m bench.exporter.hostile --for 60`.

Each edge (job files, command lines, cgroup files, /proc, web requests, configuration, credentials,
the driver's own answers) is given inputs made from right ones. Where atheris is installed, coverage
leads the way into the edges that are pure; the others, and all of them without it, are mutated
blindly. Prints how many inputs were tried and what was found; exits with 1 where there is a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.util
import logging
import os
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from bench.exporter.attacks import ATTACKS, Attack, prepared, require

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_INPUT = 8192
SLOW = 4
"""How much more of the time those have that read /proc, ask a driver or a server."""
_NUMBERS = (b"0", b"-1", b"1", b"65536", b"2147483648", b"18446744073709551616", b"1e400")
_RUNS = re.compile(r"stat::number_of_executed_units:\s*([0-9]+)")
_FAULT = re.compile(r"^(\w[\w.]*(?:Error|Exception|Interrupt|Unavailable|Lost)\b.*)$", re.MULTILINE)
_ASKS_SECONDS = 0.25


@dataclass(slots=True)
class Result:
    """What came of one attack; `faults`: where and what -> how often."""

    name: str
    way: str
    inputs: int = 0
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)


class Mutations:
    """Inputs made from right ones."""

    def __init__(
        self, seeds: tuple[bytes, ...], words: tuple[bytes, ...], chance: random.Random
    ) -> None:
        """Begin with the right ones.

        Args:
            seeds: inputs that are in order.
            words: what is often of importance in them.
            chance: decides.
        """
        self._pool = list(seeds)
        self._seeds = len(seeds)
        self._words = (*words, *_NUMBERS)
        self._chance = chance

    def next(self) -> bytes:
        """Another input."""
        chance = self._chance
        data = bytearray(chance.choice(self._pool))
        for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
            self._change(data)
        made = bytes(data[:MAX_INPUT])
        if chance.random() < 0.05:
            # Changes of changes: some go far from where they began.
            at = self._seeds + chance.randrange(64)
            self._pool[at : at + 1] = [made]
        return made

    def _change(self, data: bytearray) -> None:
        chance = self._chance
        at = chance.randrange(len(data) + 1)
        end = min(len(data), at + chance.choice((1, 2, 4, 16, 64)))
        match chance.randrange(7):
            case 0 if data:
                data[at - 1] ^= 1 << chance.randrange(8)
            case 1:
                data[at:at] = bytes([chance.randrange(256)])
            case 2:
                del data[at:end]
            case 3:
                data[at:at] = data[at:end] * chance.choice((1, 2, 50))
            case 4:
                other = chance.choice(self._pool)
                data[at:end] = other[chance.randrange(len(other) + 1) :][:256]
            case 5:
                found = list(re.finditer(rb"[0-9]+", data))
                if found:
                    number = chance.choice(found)
                    data[number.start() : number.end()] = chance.choice(_NUMBERS)
            case _:
                data[at : chance.choice((at, end))] = chance.choice(self._words)


def _mutate(attack: Attack, seconds: float, seed: int) -> Result:
    """Try one edge blindly for a while."""
    result = Result(attack.name, "mutated")
    mutations = Mutations(attack.seeds, attack.words, random.Random(seed))  # noqa: S311 (no secret)
    began = time.monotonic()
    with prepared(attack) as run:
        while (spent := time.monotonic() - began) < seconds:
            data = mutations.next() if result.inputs else attack.seeds[0]
            result.inputs += 1
            try:
                run(data)
            except Exception as error:  # noqa: BLE001 (faults are what is looked for)
                result.faults[_describe(error)] += 1
                if result.faults.total() == 1:
                    print(f"{attack.name}: {_describe(error)} by {data[:400]!r}", flush=True)
        result.seconds = spent
    return result


def _describe(error: Exception) -> str:
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "attacks" not in frame.filename
    ]
    where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno} " if frames else ""
    return f"{where}{type(error).__name__}: {error}"[:300]


def _led(attack: Attack, seconds: float, seed: int) -> Result:
    """Try one edge, led by coverage, in a process of its own: the first fault ends it."""
    result = Result(attack.name, "led by coverage", seconds=seconds)
    with tempfile.TemporaryDirectory(prefix="hostile-corpus-") as corpus:
        for number, content in enumerate(attack.seeds):
            Path(corpus, str(number)).write_bytes(content)
        words = Path(corpus, "words")
        lines = ['"' + "".join(f"\\x{byte:02x}" for byte in word) + '"' for word in attack.words]
        words.write_text("\n".join(lines))
        command = [sys.executable, "-m", "bench.exporter.led", attack.name]
        command += [f"-max_total_time={int(seconds) or 1}", f"-max_len={MAX_INPUT}"]
        command += [
            f"-seed={seed}",
            "-print_final_stats=1",
            "-timeout=10",
            f"-dict={words}",
            corpus,
        ]
        answer = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds + 120,
            cwd=Path(__file__).parents[2],
        )
    runs = _RUNS.search(answer.stderr)
    result.inputs = int(runs[1]) if runs else 0
    if answer.returncode:
        text = answer.stdout + answer.stderr
        found = _FAULT.findall(text)
        result.faults[found[0] if found else f"ended with {answer.returncode}"] += 1
        print(f"{attack.name}: {text[-3000:]}", flush=True)
    return result


# ---------------------------------------------------------------------------------------------
# Web requests: to a real server, whose answers to others must not suffer

_GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n"
_REQUESTS = Attack(
    "web requests",
    lambda _folder, _stack: lambda _data: None,
    (
        _GET,
        _GET + _GET,
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
        b"GET /-/ready HTTP/1.0\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    ),
    (
        *(b"\r\n", b"\n", b"\0", b": ", b"Content-Length: 99999999999\r\n", b"HTTP/2.0", b"%ff"),
        *(b"Transfer-Encoding: chunked\r\n", b"/../../etc/passwd", b"?" * 100, b"\xff", b"HEAD "),
        *(b"Expect: 100-continue\r\n", b"X-Prometheus-Scrape-Timeout-Seconds: 0.01\r\n"),
    ),
    pure=False,
)


@contextlib.contextmanager
def _exporter() -> Iterator[tuple[str, int]]:
    with tempfile.TemporaryDirectory(prefix="hostile-web-") as folder:
        scenario = Path(folder, "scenario")
        scenario.write_text("card index=0\n")
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        command = [sys.executable, "-m", "gpuwarden", "exporter", "--log.level", "error"]
        command += ["--gpus", f"simulated:{scenario}", "--jobs.directory", f"{folder}/jobs"]
        command += ["--release-file", f"{folder}/release"]
        command += ["--web.listen-address", f"127.0.0.1:{port}"]
        program = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 60
            while _scrape("127.0.0.1", port) != 200:
                require(holds=time.monotonic() < deadline, what="the exporter does not start")
                time.sleep(0.1)
            yield "127.0.0.1", port
            require(holds=program.poll() is None, what="the exporter ended")
        finally:
            program.terminate()
            program.wait()


def _scrape(host: str, port: int) -> int:
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        connection.request("GET", "/metrics")
        answer = connection.getresponse()
        whole = b"gpuwarden_nvml_up 1.0" in answer.read()
    except (OSError, http.client.HTTPException):
        return 0
    else:
        return answer.status if whole else 0
    finally:
        connection.close()


def _ask(address: tuple[str, int], data: bytes) -> bytes:
    """What a server answers to bytes, or does within a moment."""
    found = b""
    with socket.create_connection(address, timeout=10) as connection:
        connection.settimeout(_ASKS_SECONDS)
        with contextlib.suppress(OSError):
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(65536):
                found += part
    return found


def _web(seconds: float, seed: int) -> Result:
    result = Result(_REQUESTS.name, "mutated, one real server")
    mutations = Mutations(_REQUESTS.seeds, _REQUESTS.words, random.Random(seed))  # noqa: S311
    began = time.monotonic()
    with _exporter() as address:
        while (spent := time.monotonic() - began) < seconds:
            data = mutations.next()
            result.inputs += 1
            answer = _ask(address, data)
            if answer and not answer.startswith(b"HTTP/1."):
                result.faults[f"no answer of HTTP: {answer[:60]!r}"] += 1
            elif b"HTTP/1.1 500" in answer:
                result.faults["500"] += 1
                print(f"web requests: 500 by {data!r}", flush=True)
            if result.inputs % 50 == 0 and _scrape(*address) != 200:
                result.faults["a scrape beside it failed"] += 1
        result.seconds = spent
    return result


# ---------------------------------------------------------------------------------------------


def _run(attack: Attack, seconds: float, seed: int, *, led: bool) -> Result:
    if attack is _REQUESTS:
        return _web(seconds, seed)
    return _led(attack, seconds, seed) if led and attack.pure else _mutate(attack, seconds, seed)


def main() -> int:
    """Run the attacks and print what came of them; 1 where a fault was found."""
    names = [attack.name for attack in (*ATTACKS, _REQUESTS)]
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--for", dest="seconds", type=float, default=60.0, help="of all together")
    parser.add_argument("--only", choices=names, help="one edge")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(3)))
    parser.add_argument("--blind", action="store_true", help="without coverage")
    given = parser.parse_args()
    logging.disable()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    attacks = [item for item in (*ATTACKS, _REQUESTS) if given.only in (None, item.name)]
    led = not given.blind and importlib.util.find_spec("atheris") is not None
    print(f"seed {given.seed}, {'atheris' if led else 'no atheris'}")
    results = []
    for attack in attacks:
        share = (1 if attack.pure else SLOW) / sum(1 if item.pure else SLOW for item in attacks)
        result = _run(attack, given.seconds * share, given.seed, led=led)
        results.append(result)
        print(
            f"{result.name:24} {result.inputs:>10,} inputs {result.seconds:7.0f} s "
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
