"""Logging of the daemons: one call per process; JSON lines for machines, columns for a terminal."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

import structlog


def configure(level: str = "info", form: str = "auto", stream: TextIO | None = None) -> None:
    """Set up structlog and route the standard library's loggers through it.

    Args:
        level: debug, info, warning or error.
        form: `json`, `console`, or `auto`: console on a terminal, JSON elsewhere.
        stream: where lines go; standard error by default.
    """
    out = stream if stream is not None else sys.stderr
    console = form == "console" or (form == "auto" and out.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.UnicodeDecoder(),
    ]
    if console:
        last: list[structlog.typing.Processor] = [
            structlog.dev.ConsoleRenderer(colors=out.isatty()),
        ]
    else:
        last = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *last],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # uvicorn's access log would repeat every scrape; httpx would repeat every query.
    for noisy in ("uvicorn.access", "httpx", "httpcore", "httpx2", "httpcore2"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
