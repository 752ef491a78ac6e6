"""Templates, and what they are given: every text escaped, every time in the reader's zone.

Pages run no script and load nothing but their style sheet; the policy that says so goes with each.
"""

from __future__ import annotations

import datetime as dt
import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from markupsafe import Markup, escape
from starlette.responses import HTMLResponse, Response

from gpuwarden import durations, quantities
from gpuwarden.ruleengine import explain, losses
from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.base_paths import base_of, linked
from gpuwarden.ruleengine.enforcement_routes import enforcement_document
from gpuwarden.ruleengine.leave_documents import leave_sentence
from gpuwarden.ruleengine.messages import about, local_time
from gpuwarden.ruleengine.roles import STRANGER, Role
from gpuwarden.ruleengine.unknown_reasons import REASONS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jinja2.runtime import Context
    from starlette.requests import Request

    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.names import Names
    from gpuwarden.ruleengine.roles import Person
    from gpuwarden.ruleengine.sign_ins import SignIns

_FOLDER = Path(__file__).resolve().parent.parent / "templates"
_STYLE = (_FOLDER / "style.css").read_text(encoding="utf-8")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    # Same origin and not none: with none browsers hide from us where our own forms come from.
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_OTHERWISE = ("by", "level", "rule", "case", "decision")
"""Details of events that stand elsewhere in their row, or on the page."""
_DURATIONS = ("elapsed", "for", "seconds", "kept", "notice_age", "work_lost", "age", "after")
"""Details of events that count seconds."""
_RFC3339 = re.compile(r"\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|[+-]\d\d:\d\d)")


@functools.cache
def _environment() -> Environment:
    """Every template, read now: an upgrade on disk must not change the pages of what still runs."""
    found = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        auto_reload=False,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "when": _when,
        "local": _local,
        "about": about,
        "duration": durations.render,
        "gib": _gib,
        "segment": lambda text: quote(text, safe=""),
        "moment": _moment,
        "proof": explain.proof_line,
        "risk": losses.risk_line,
        "loss": losses.loss_lines,
        "cause": explain.cause_lines,
        "details": _details,
        "brief": _brief,
        "hour": _hour,
        "lapse": about,
        "leave": leave_sentence,
    }
    for name in found.list_templates(extensions=("html",)):
        found.get_template(name)
    return found


class Pages:
    """Renders templates for one engine.

    Args:
        engine: whose state every page shows.
        sign_ins: for forms, and for whether signing in is possible.
        names: takes those out that the reader may not read.
    """

    def __init__(self, engine: Engine, sign_ins: SignIns, names: Names) -> None:
        self._engine = engine
        self._sign_ins = sign_ins
        self._names = names
        self._environment = _environment()
        self._base = base_of(engine.settings.external_url)

    def zone(self, person: Person | None) -> str:
        """The time zone for who reads a page."""
        name = "" if person is None else person.name
        return self._engine.rulebook.directory.user(name).timezone or (
            self._engine.rulebook.rules.timezone
        )

    def render(
        self,
        template: str,
        request: Request,
        person: Person | None,
        *,
        status: int = 200,
        zone: str | None = None,
        **values: Any,
    ) -> HTMLResponse:
        """A page.

        Args:
            template: name of the template.
            request: that asks for it.
            person: who reads it, or None: nobody who has signed in.
            status: of HTTP.
            zone: for times, in the place of the reader's.
            values: what the template names.
        """
        known = person is not None and bool(person.name)
        shown = {
            "path": request.url.path,
            "person": person if known else None,
            "can_sign_in": self._sign_ins.possible,
            "form": self._sign_ins.form(person) if person is not None and known else "",
            "operator": person is not None and person.role.includes(Role.OPERATOR),
            "admin": known and person is not None and person.role is Role.ADMIN,
            # The API takes no session: a link to it is for whom the proxy names, or where all read.
            "api_opens": not known or person is None or person.session.startswith("proxy "),
            "can_open": known and person is not None and self._names.must_open(person),
            "zone": zone or self.zone(person),
            "scheduled": self._engine.settings.scheduler is not None,
            "leaves": self._engine.settings.leaves is not None,
            "reasons": REASONS,
            "newer": "",
            "older": "",
            "turn": "",
            "notice": "",
            "refusal": "",
            # Without a person it is the sign-in, or the page of one's own job by a signed link.
            **self._names.veil(person, values),
            **self._names.veil(
                person or STRANGER,
                {
                    "enforcement": enforcement_document(self._engine),
                    "problems": self._engine.problems,
                },
            ),
        }
        body = linked(self._environment.get_template(template).render(shown), self._base)
        return HTMLResponse(body, status_code=status, headers=HEADERS)

    def bounce(self, target: str) -> str:
        """A page that leads to another one of ours at once."""
        return self._environment.get_template("bounce.html").render(target=self._base + target)

    async def style(self, _request: Request) -> Response:
        """The style sheet of every page."""
        return Response(
            _STYLE, media_type="text/css", headers={"Cache-Control": "public, max-age=300"}
        )


@pass_context
def _when(context: Context, text: str | None) -> Markup:
    """A time of a document in the reader's zone, with its offset."""
    if not text:
        return Markup("")
    return Markup('<time datetime="{}">{}</time>').format(text, _shown(text, context["zone"]))


@pass_context
def _local(context: Context, text: str) -> Markup:
    """A sentence whose times are told in the reader's zone."""
    zone = context["zone"]

    def shown(match: re.Match[str]) -> str:
        try:
            return _shown(match.group(), zone)
        except (ValueError, OverflowError, OSError):
            # Reasons are people's own words, and need not name a day that there is.
            return match.group()

    return escape(_RFC3339.sub(shown, text))


def _shown(text: str, zone: str) -> str:
    moment = local_time(dt.datetime.fromisoformat(text).timestamp(), zone)
    offset = f"{moment:%z}"
    return f"{moment:%a %d %b %Y %H:%M:%S} {offset[:3]}:{offset[3:]}"


@pass_context
def _moment(context: Context, moment: float) -> Markup:
    """A Unix time in the reader's zone."""
    return _when(context, rfc3339(moment))


@pass_context
def _brief(context: Context, moment: float) -> Markup:
    """A Unix time to the minute, as far as somebody who waits wants to know it."""
    local = local_time(moment, context["zone"])
    return Markup('<time datetime="{}">{}</time>').format(
        rfc3339(moment), f"{local:%a %d %b %H:%M}"
    )


@pass_context
def _hour(context: Context, moment: float) -> Markup:
    """A Unix time of a day that is known."""
    local = local_time(moment, context["zone"])
    return Markup('<time datetime="{}">{}</time>').format(rfc3339(moment), f"{local:%H:%M}")


@pass_context
def _details(context: Context, detail: Mapping[str, Any]) -> str:
    """What an event says beside who: its plain values; evidence has a table of its own."""
    found = []
    for name, value in detail.items():
        words = name.replace("_", " ")
        if name in _OTHERWISE or value in ("", None):
            continue
        if name in _DURATIONS and isinstance(value, int | float):
            found.append(f"{words} {about(value)}")
        elif name.endswith("_at") and isinstance(value, int | float):
            found.append(f"{words} {_shown(rfc3339(value), context['zone'])}")
        elif isinstance(value, str | int | float):
            found.append(f"{words} {value}")
    return ", ".join(found)


def _gib(value: float | None) -> str:
    return "" if value is None else quantities.render(value, quantities.Unit.BYTES)
