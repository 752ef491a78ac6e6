"""The report's page as PDF, by WeasyPrint: nothing is fetched, whatever the page says."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NoReturn

from gpuwarden.errors import MissingExtra, ServiceUnavailable

if TYPE_CHECKING:
    from types import ModuleType


def pdf(text: str) -> bytes:
    """A page on A4.

    Args:
        text: HTML that needs nothing from elsewhere.

    Raises:
        MissingExtra: WeasyPrint is not installed.
        ServiceUnavailable: the libraries that it draws with are not.
    """
    found: Any = _library()
    made: bytes = found.HTML(string=text, url_fetcher=_refused).write_pdf()
    return made


def _library() -> ModuleType:
    try:
        return importlib.import_module("weasyprint")
    except ModuleNotFoundError as error:
        name = (error.name or "weasyprint").partition(".")[0]
        raise MissingExtra("report --output pdf", name, "report") from error
    except OSError as error:
        raise ServiceUnavailable(
            "WeasyPrint does not find the library that it draws text with: apt-get install "
            f"--no-install-recommends libpango-1.0-0 libpangoft2-1.0-0 ({error})"
        ) from error


def _refused(url: str, *_more: object, **_options: object) -> NoReturn:
    raise ValueError(f"a report loads nothing: {url}")
