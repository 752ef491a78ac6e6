"""The exporter's web server: metrics, health, a landing page."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
import uvicorn
from starlette.applications import Starlette
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from gpuwarden import __version__
from gpuwarden.exporter.pages import Format
from gpuwarden.exporter.servers import Bounded, end_by_signal, listening, raise_open_files
from gpuwarden.exporter.supervision import Supervision
from gpuwarden.exporter.web_configs import Guarded, Web

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp

    from gpuwarden.exporter.sampler import Sampler
    from gpuwarden.exporter.settings import ExporterSettings

METRICS_PATH = "/metrics"
_SHUTDOWN_SECONDS = 1

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


def application(sampler: Sampler) -> Starlette:
    """The web application.

    Args:
        sampler: where pages come from.
    """

    async def metrics(request: Request) -> Response:
        form = wanted_format(request.headers.get("accept", ""))
        compressed = takes_gzip(request.headers.get("accept-encoding", ""))
        headers = {
            "content-type": form.value,
            "cache-control": "no-store",
            "vary": "accept, accept-encoding",
        }
        if compressed:
            headers["content-encoding"] = "gzip"
        body = sampler.page().body.get_encoded(form, compressed=compressed)
        return Response(body, headers=headers)

    async def healthy(_request: Request) -> Response:
        return PlainTextResponse("healthy\n")

    async def ready(_request: Request) -> Response:
        if sampler.ready and not sampler.released:
            return PlainTextResponse("ready\n")
        reason = sampler.problem or "the node has not been read completely yet"
        return PlainTextResponse(f"not ready: {reason}\n", status_code=503)

    async def landing(_request: Request) -> Response:
        return HTMLResponse(_LANDING)

    return Starlette(
        routes=[
            Route("/", landing),
            Route(METRICS_PATH, metrics),
            Route("/-/healthy", healthy),
            Route("/-/ready", ready),
        ]
    )


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
        http="h11",
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
        program = uvicorn.Server(config)
        end_by_signal(program)
        sampler.start()
        try:
            program.run(sockets=[server])
        finally:
            supervision.stopping()
            sampler.stop()
            _logger.info("stopped")
