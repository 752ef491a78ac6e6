"""Pages of nodes of every kind, read by those who read pages: promtool, and Prometheus itself."""

from __future__ import annotations

import math
import subprocess
import threading
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from tests.exporter.fixtures import scenarios
from tests.exporter.nodes import Children, own_launchers
from tests.exporter.test_collector import JOB, SNAPSHOT
from tests.servers import binary, prometheus, until

from gpuwarden.catalogue import CATALOGUE, Source
from gpuwarden.exporter.app import wanted_format
from gpuwarden.exporter.attribution import Attribution
from gpuwarden.exporter.collector import collect
from gpuwarden.exporter.nvml import Nvml
from gpuwarden.exporter.pages import Bodies, Format
from gpuwarden.exporter.runs import prepare
from gpuwarden.exporter.sampler import Sampler
from gpuwarden.exporter.settings import ExporterSettings
from gpuwarden.exporter.simulated import build
from gpuwarden.exporter.switches import SWITCHES

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

pytestmark = pytest.mark.system

HOSTILE = 'a\\b"c\nd\te\x00\x07{},=#\ud800\N{SNOWMAN}' + "x" * 400


@dataclass
class Shelf:
    """Pages by name, served as the exporter serves them; `given`: name -> formats asked for."""

    pages: Mapping[str, Mapping[Format, bytes]]
    given: dict[str, set[Format]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Mapping[Format, bytes]]:
    """Kind of node -> its page."""
    folder = tmp_path_factory.mktemp("nodes")
    prepare(folder / "jobs")
    children = Children()
    found: dict[str, Mapping[Format, bytes]] = {}
    try:
        for name, scenario in scenarios([children.start().pid for _ in range(4)]).items():
            nvml = Nvml(
                build(), scenario=scenario.write(folder / f"{name}.scenario"), collectors=SWITCHES
            )
            attribution = Attribution(folder / "jobs", launchers=own_launchers())
            settings = ExporterSettings(collectors=frozenset(SWITCHES))
            sampler = Sampler(settings, nvml, attribution)
            sampler.sample()
            found[name] = sampler.sample().body
            sampler.stop()
    finally:
        children.close()
    hostile = replace(JOB, user=HOSTILE, executables=((HOSTILE, HOSTILE),), framework=HOSTILE)
    for name, snapshot in {
        "every-metric": SNAPSHOT,
        "hostile-names": replace(SNAPSHOT, jobs=(hostile,)),
    }.items():
        families, _ = collect(snapshot, totals={HOSTILE: 1}, collectors=SWITCHES)
        found[name] = Bodies(families)
    return found


def test_every_page_is_one_for_promtool(pages: dict[str, Mapping[Format, bytes]]) -> None:
    """No page of any node has anything that promtool complains of."""
    for name, page in pages.items():
        answer = subprocess.run(
            [binary(("promtool",)), "check", "metrics"],
            check=False,
            capture_output=True,
            input=page[Format.TEXT],
            timeout=60,
        )
        assert (answer.returncode, answer.stdout, answer.stderr) == (0, b"", b""), name


def test_both_formats_are_the_same_page(pages: dict[str, Mapping[Format, bytes]]) -> None:
    """Text and OpenMetrics hold the same samples, of each series one, and each a number."""
    for name, page in pages.items():
        formats = []
        for form, parse in ((Format.TEXT, parse_text), (Format.OPENMETRICS, parse_openmetrics)):
            read = [sample for one in parse(page[form].decode()) for sample in one.samples]
            samples = {(item.name, tuple(sorted(item.labels.items()))): item.value for item in read}
            assert len(samples) == len(read), name
            assert not any(math.isnan(value) for value in samples.values()), name
            formats.append(samples)
        assert formats[0] == formats[1], name


def test_every_metric_is_on_a_page(pages: dict[str, Mapping[Format, bytes]]) -> None:
    """Whatever the catalogue promises of the exporter is measured on a node of some kind."""
    seen = {
        sample.name
        for page in pages.values()
        for one in parse_text(page[Format.TEXT].decode())
        for sample in one.samples
    }
    promised = {name for name, metric in CATALOGUE.items() if metric.source is Source.EXPORTER}
    assert seen == promised


@pytest.fixture
def shelf(pages: dict[str, Mapping[Format, bytes]]) -> Iterator[tuple[Shelf, int]]:
    """The pages on a server, and its port."""
    held = Shelf(pages)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.strip("/")
            form = wanted_format(self.headers.get("accept", ""))
            held.given.setdefault(name, set()).add(form)
            self.send_response(200)
            self.send_header("content-type", form.value)
            self.end_headers()
            self.wfile.write(held.pages[name][form])

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield held, server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def test_prometheus_takes_every_page_whole(shelf: tuple[Shelf, int], tmp_path: Path) -> None:
    """Prometheus asks for OpenMetrics and stores each sample of each page; none is a duplicate."""
    held, port = shelf
    jobs = "".join(
        f"- {{job_name: {name}, metrics_path: /{name}, static_configs: "
        f"[{{targets: ['127.0.0.1:{port}']}}]}}\n"
        for name in held.pages
    )
    config = f"global: {{scrape_interval: 1s, scrape_timeout: 1s}}\nscrape_configs:\n{jobs}"
    with prometheus(config, tmp_path / "tsdb") as server:

        def stored(metric: str) -> dict[str, float]:
            return {row["metric"]["job"]: float(row["value"][1]) for row in server.query(metric)}

        until(lambda: len(stored("scrape_samples_scraped > 0")) == len(held.pages))
        wanted = {
            name: sum(len(one.samples) for one in parse_text(page[Format.TEXT].decode()))
            for name, page in held.pages.items()
        }
        assert stored("scrape_samples_post_metric_relabeling") == wanted
        assert set(stored("up").values()) == {1.0}
        errors = [
            target["lastError"]
            for target in server.json("/api/v1/targets?state=active")["data"]["activeTargets"]
        ]
        assert set(errors) == {""}
        assert stored('count by (job) ({__name__=~".+", job!=""}) > 0').keys() == wanted.keys()
    assert all(forms == {Format.OPENMETRICS} for forms in held.given.values())
