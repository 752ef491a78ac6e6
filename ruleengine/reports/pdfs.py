"""The report's page as PDF, by WeasyPrint: nothing is fetched, whatever the page says."""

from __future__ import annotations

import importlib
import re
from typing import TYPE_CHECKING, Any, NoReturn

from gpuwarden.errors import MissingExtra, ServiceUnavailable

if TYPE_CHECKING:
    from types import ModuleType

_VARIABLE = re.compile(r"var\((--[a-z-]+)\)")
_RULES = re.compile(r"\bsvg (\.?[a-z0-9]+) \{([^}]*)\}")
_PLOT = re.compile(r'<svg class="plot"[^>]*>')


def pdf(text: str) -> bytes:
    """A page on A4.

    Args:
        text: HTML that needs nothing from elsewhere.

    Raises:
        MissingExtra: WeasyPrint is not installed.
        ServiceUnavailable: the libraries that it draws with are not.
    """
    found: Any = _library()
    made: bytes = found.HTML(string=resolved(text), url_fetcher=_refused).write_pdf()
    return made


def resolved(text: str) -> str:
    """The page as WeasyPrint needs it: it knows no variables, nor a page's rules, within SVG."""
    head, end, rest = text.partition("</style>")
    root = re.search(r":root \{(.*?)\}", head, re.DOTALL)
    colours = {} if root is None else dict(re.findall(r"(--[a-z-]+): ([^;]+);", root[1]))
    head = _VARIABLE.sub(lambda found: colours.get(found[1], found[0]), head)
    rules = "".join(f"{name} {{{body}}}" for name, body in _RULES.findall(head))
    return head + end + _PLOT.sub(lambda found: f"{found[0]}<style>{rules}</style>", rest)


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
