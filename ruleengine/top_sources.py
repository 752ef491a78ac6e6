"""Where `gpuwarden top` asks: an engine, or the exporters of a lab without one."""

from __future__ import annotations

import ssl
import time
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import quote, urlencode

import httpx

from gpuwarden.errors import InvalidInput, ServiceUnavailable
from gpuwarden.ruleengine.clients import ask, whole_body
from gpuwarden.ruleengine.fleet_documents import SCHEMA
from gpuwarden.ruleengine.top_answers import checked_fleet
from gpuwarden.ruleengine.top_exporters import Pages, read_page
from gpuwarden.ruleengine.top_pictures import Picture, Question

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

MAX_PAGE_BYTES: Final = 32 * 1024 * 1024
MAX_EXPORTERS: Final = 64
"""More nodes are for an engine."""
_TIMEOUT = httpx.Timeout(5.0, connect=3.0)
_SECONDS: Final = 10.0
"""For a whole page."""
_DEFAULT_PORT = 9835


class Source(Protocol):
    """Where pictures come from; every call ends within its time, and is made by one thread."""

    def picture(self, question: Question) -> Picture:
        """What is so now.

        Raises:
            ServiceUnavailable: nobody answers.
            RefusedAction: who asks may not.
        """

    def details(self, job_id: str, /) -> dict[str, Any] | None:
        """Everything known of a job, of the schema gpuwarden.job/v1; None: no more than its row."""


class EngineSource:
    """An engine's API.

    Args:
        url: its base address.
        headers: such as a token's.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        self._url = url
        self._headers = headers

    def picture(self, question: Question) -> Picture:
        """What the engine knows."""
        path = f"/v1/fleet?{urlencode(question.parameters())}"
        document = ask("GET", self._url, path, headers=self._headers)
        return Picture("engine", (self._url,), checked_fleet(document, self._url), time.monotonic())

    def details(self, job_id: str, /) -> dict[str, Any] | None:
        """Everything that the engine knows of a job."""
        path = f"/v1/jobs/{quote(job_id, safe='')}"
        return ask("GET", self._url, path, headers=self._headers)


class ExporterSource:
    """The pages of exporters; those that do not answer are named beside what the others say.

    Args:
        urls: addresses of exporters: `http://gpu-1:9835`, or `gpu-1`.
        login: user and password for all of them, or None.
        ca_file: certificates for their TLS, or None for the system's.

    Raises:
        InvalidInput: an address or the file is none.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        login: tuple[str, str] | None = None,
        ca_file: Path | None = None,
    ) -> None:
        if len(urls) > MAX_EXPORTERS:
            raise InvalidInput(f"--exporter: at most {MAX_EXPORTERS}; more nodes are for an engine")
        self._urls = tuple(dict.fromkeys(map(page_address, urls)))
        verify: ssl.SSLContext | bool = True
        if ca_file is not None:
            try:
                verify = ssl.create_default_context(cafile=str(ca_file))
            except OSError as error:
                raise InvalidInput(f"--ca-file: {ca_file} cannot be used: {error}") from error
        self._client = httpx.Client(
            verify=verify,
            auth=login,
            timeout=_TIMEOUT,
            trust_env=False,
            follow_redirects=False,
            limits=httpx.Limits(max_connections=4),
        )
        self._pages = Pages()

    def picture(self, question: Question) -> Picture:
        """What the exporters know."""
        now = time.monotonic()
        pages, problems = {}, []
        for url in self._urls:
            place = url.removesuffix("/metrics").partition("://")[2]
            try:
                pages[place] = read_page(self._read(url), url)
            except ServiceUnavailable as error:
                problems.append(str(error))
        if not pages:
            raise ServiceUnavailable("; ".join(problems))
        rows = self._pages.rows(pages, now)
        found = [row for row in rows if _admits(question, row)]
        _sort(found, question)
        cards, held = self._pages.cards(pages)
        document = {
            "schema": SCHEMA,
            "time": None,
            "age": 0.0,
            "tick": 5.0,
            "figures_at": None,
            "problem": "; ".join(problems),
            "nodes": {"expected": len(self._urls), "lit": len(pages)},
            "cards": cards,
            "held": held,
            "halted": [],
            "sort": question.sort,
            "total": len(found),
            "broken": 0,
            "offset": question.offset,
            "jobs": found[question.offset : question.offset + question.limit],
        }
        return Picture("exporters", self._urls, document, now)

    def details(self, _job_id: str, /) -> dict[str, Any] | None:
        """An exporter says no more of a job than its row."""
        return None

    def _read(self, url: str) -> str:
        began = time.monotonic()
        try:
            with self._client.stream("GET", url) as response:
                if response.status_code != 200:
                    raise ServiceUnavailable(f"{url}: HTTP {response.status_code}")
                body = whole_body(
                    response, url, began=began, seconds=_SECONDS, limit=MAX_PAGE_BYTES
                )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServiceUnavailable(
                f"{url} does not answer ({str(error) or type(error).__name__})"
            ) from error
        return body.decode("utf-8", errors="replace")


def page_address(text: str) -> str:
    """The address of an exporter's page: scheme, port and path may be left out.

    Raises:
        InvalidInput: it is none, or holds a password: others on this machine could read that.
    """
    whole = text if "://" in text else f"http://{text}"
    try:
        url = httpx.URL(whole)
    except httpx.InvalidURL as error:
        raise InvalidInput(f"--exporter {text}: {error}") from error
    if url.userinfo:
        raise InvalidInput("--exporter: no password in an address; see --exporter.password-file")
    if url.scheme not in ("http", "https") or not url.host:
        raise InvalidInput(f"--exporter {text}: write it like http://gpu-1:{_DEFAULT_PORT}")
    if url.port is None and "://" not in text:
        url = url.copy_with(port=_DEFAULT_PORT)
    return str(url if url.path not in ("", "/") else url.copy_with(path="/metrics"))


def _admits(question: Question, row: Mapping[str, Any]) -> bool:
    return (
        question.user.lower() in row["user"].lower()
        and question.node.lower() in row["node"].lower()
        and not question.team
        and not question.rule
        and not question.broken
    )


def _sort(rows: list[dict[str, Any]], question: Question) -> None:
    keys: dict[str, Callable[[Mapping[str, Any]], Any]] = {
        "node": lambda row: row["node"],
        "user": lambda row: (not row["user"], row["user"].lower()),
        "gpus": lambda row: -len(row["gpus"]),
        "utilization": lambda row: (row["utilization"] is None, row["utilization"] or 0.0),
        "memory": lambda row: (row["memory_bytes"] is None, -(row["memory_bytes"] or 0.0)),
        "time-left": lambda row: (row["time_left"] is None, row["time_left"] or 0.0),
    }
    chosen = keys.get(question.sort, keys["node"])
    rows.sort(key=lambda row: (chosen(row), row["node"], row["job_id"]), reverse=question.reverse)
