"""The exporter's web server: metrics, health, a landing page."""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING

import structlog
import uvicorn

from gpuwarden import __version__
from gpuwarden.exporter.connections import ReadersConnection
from gpuwarden.exporter.log_targets import LogTargets
from gpuwarden.exporter.pages import Format
from gpuwarden.exporter.servers import (
    Bounded,
    QuietServer,
    end_by_signal,
    listening,
    raise_open_files,
)
from gpuwarden.exporter.sites import HTML, Answer, Site
from gpuwarden.exporter.supervision import Supervision
from gpuwarden.exporter.textfiles import Textfile
from gpuwarden.exporter.web_configs import Guarded, Web

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from gpuwarden.exporter.sampler import Sampler
    from gpuwarden.exporter.settings import ExporterSettings
    from gpuwarden.exporter.sites import Headers

METRICS_PATH = "/metrics"
_SHUTDOWN_SECONDS = 1
_DEADLINE_HEADER = "x-prometheus-scrape-timeout-seconds"
_MARGIN_SECONDS = 0.5
_LONGEST_WAIT_SECONDS = 30.0
_LOOK_SECONDS = 0.02

_LANDING = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>gpuwarden exporter</title></head>
<body><h1>gpuwarden exporter {__version__}</h1>
<p>GPUs of this node, the jobs on them, and how well they train.</p>
<ul><li><a href="{METRICS_PATH}">Metrics</a></li>
<li><a href="/-/healthy">Healthy</a>: the process answers</li>
<li><a href="/-/ready">Ready</a>: the node has been read completely</li></ul>
</body></html>
"""

_logger = structlog.get_logger(__name__)


_HEADERS = (("cache-control", "no-store"), ("vary", "accept, accept-encoding"))
_COMPRESSED_HEADERS = (*_HEADERS, ("content-encoding", "gzip"))


def application(sampler: Sampler) -> Site:
    """The web application.

    Args:
        sampler: where pages come from.
    """

    async def metrics(headers: Headers) -> Answer:
        await _first_page(sampler, patience_of(headers.get(_DEADLINE_HEADER)))
        form = wanted_format(headers.get("accept"))
        compressed = takes_gzip(headers.get("accept-encoding"))
        body = sampler.page().body.get_encoded(form, compressed=compressed)
        return Answer(body, form.value, headers=_COMPRESSED_HEADERS if compressed else _HEADERS)

    async def healthy(_headers: Headers) -> Answer:
        return Answer(b"healthy\n")

    async def ready(_headers: Headers) -> Answer:
        if sampler.ready and not sampler.released:
            return Answer(b"ready\n")
        reason = sampler.problem or "the node has not been read completely yet"
        return Answer(f"not ready: {reason}\n".encode(), status=503)

    async def landing(_headers: Headers) -> Answer:
        return Answer(_LANDING.encode(), HTML)

    return Site({"/": landing, METRICS_PATH: metrics, "/-/healthy": healthy, "/-/ready": ready})


async def _first_page(sampler: Sampler, seconds: float) -> None:
    """Wait for the first snapshot: a scrape right after the start is no sign of a dead driver.

    From then on nobody waits: there is a page, or it is known that there is none.
    """
    for _ in range(int(seconds / _LOOK_SECONDS)):
        if sampler.begun:
            break
        await asyncio.sleep(_LOOK_SECONDS)


def patience_of(timeout: str) -> float:
    """How long a scrape may be kept waiting, in seconds.

    Args:
        timeout: the header in which Prometheus says when it will give up; empty: without it
            nobody waits.
    """
    try:
        seconds = float(timeout)
    except ValueError:
        return 0.0
    if not 0 < seconds < math.inf:
        return 0.0
    return min(seconds - min(_MARGIN_SECONDS, seconds / 2), _LONGEST_WAIT_SECONDS)


def wanted_format(accept: str) -> Format:
    """The format that an Accept header prefers: OpenMetrics where it is named, unless refused.

    Args:
        accept: the header's value.
    """
    best, chosen = 0.0, Format.TEXT
    for item in accept.split(","):
        media, *parameters = (part.strip().lower() for part in item.split(";"))
        quality = 1.0
        for parameter in parameters:
            key, _, value = parameter.partition("=")
            if key.strip() == "q":
                quality = _quality(value)
        if media == "application/openmetrics-text":
            form = Format.OPENMETRICS
        elif media in ("text/plain", "text/*", "*/*"):
            form = Format.TEXT
        else:
            continue
        if quality > best:
            best, chosen = quality, form
    return chosen


def takes_gzip(accept_encoding: str) -> bool:
    """Whether an Accept-Encoding header names gzip and does not refuse it.

    Args:
        accept_encoding: the header's value.
    """
    for item in accept_encoding.split(","):
        coding, *parameters = (part.strip().lower() for part in item.split(";"))
        if coding == "gzip":
            return not any(
                key.strip() == "q" and _quality(value) == 0
                for key, _, value in (parameter.partition("=") for parameter in parameters)
            )
    return False


def _quality(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0 <= value <= 1 else 0.0


def serve(settings: ExporterSettings, sampler: Sampler) -> None:
    """Serve until SIGTERM or SIGINT; the sampler is stopped and the driver shut down.

    Args:
        settings: where to listen, and how many requests at a time.
        sampler: not yet started.

    Raises:
        TemporaryError: the address cannot be had.
        InvalidInput: the web configuration file is wrong.
        MissingExtra: what that file takes is not installed.
    """
    raise_open_files()
    supervision = Supervision()
    served: ASGIApp = application(sampler)
    web = None
    if settings.web_config is not None:
        web = Web(settings.web_config)
        served = Guarded(served, web)
    config = uvicorn.Config(
        Bounded(served, settings.max_requests),
        access_log=False,
        callback_notify=supervision.alive,
        date_header=False,
        http=ReadersConnection,
        lifespan="off",
        log_config=None,
        server_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_SECONDS,
        timeout_keep_alive=30,
        timeout_notify=max(1, int(supervision.interval)),
        ws="none",
    )
    config.load()
    if web is not None:
        config.ssl = web.tls
    with listening(settings.host, settings.port) as server:
        host, port = server.getsockname()[:2]
        _logger.info("listening", address=f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
        program = QuietServer(config)
        end_by_signal(program)
        sampler.start()
        registrar = None
        if settings.engine is not None:
            # Most nodes need no HTTP client.
            from gpuwarden.exporter.registration import Registrar  # noqa: PLC0415

            scheme = "https" if config.ssl is not None else "http"
            registrar = Registrar(settings.engine, host=settings.host, port=port, scheme=scheme)
            registrar.start()
        textfile = None
        if settings.textfile_directory is not None:
            textfile = Textfile(settings.textfile_directory, sampler, interval=settings.interval)
            textfile.start()
        listed = None
        if settings.log_targets is not None:
            listed = LogTargets(settings.log_targets, sampler)
            listed.start()
        try:
            program.run(sockets=[server])
        finally:
            supervision.stopping()
            if registrar is not None:
                registrar.leave()
            if textfile is not None:
                textfile.stop()
            if listed is not None:
                listed.stop()
            sampler.stop()
            if registrar is not None:
                registrar.stop()
            _logger.info("stopped")
