"""The pages that only show: overview, jobs, decisions, rules, protections, engine, audit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

from starlette.routing import Route

from gpuwarden import durations
from gpuwarden.refusals import Refusal
from gpuwarden.ruleengine import charts, documents, explain
from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.appeals import APPEALED, AppealDesk
from gpuwarden.ruleengine.audit_routes import decision_audit
from gpuwarden.ruleengine.cards import CardFilter, cards_document
from gpuwarden.ruleengine.documents import JobFilter
from gpuwarden.ruleengine.job_histories import HOURS
from gpuwarden.ruleengine.keeps import MAX_KEEP_SECONDS
from gpuwarden.ruleengine.pauses import switched_on
from gpuwarden.ruleengine.queries import moment, page_number, whole
from gpuwarden.ruleengine.roles import Role

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from starlette.requests import Request
    from starlette.responses import Response

    from gpuwarden.ruleengine.access import Access
    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.job_histories import JobHistories
    from gpuwarden.ruleengine.keeps import KeepDesk
    from gpuwarden.ruleengine.pages.rendering import Pages
    from gpuwarden.ruleengine.roles import Person

PER_PAGE = 100
_ATTENTION = 20
_DECISIONS = 10
_NOTHING_YET = "Nothing is known yet: no tick has been completed."
_TONES = {"verified": "good", "authorised": "bad", "acting": "bad", "due": "bad"}


class Readings:
    """Handlers of the pages that change nothing.

    Args:
        engine: whose state they show.
        access: who may see it.
        pages: renders them.
        desk: tells which jobs their reader may keep.
        histories: for the charts.
    """

    def __init__(
        self,
        engine: Engine,
        access: Access,
        pages: Pages,
        *,
        desk: KeepDesk,
        histories: JobHistories,
    ) -> None:
        self._engine = engine
        self._access = access
        self._pages = pages
        self._desk = desk
        self._histories = histories
        self._appeals = AppealDesk(engine)

    def routes(self) -> list[Route]:
        """What to serve."""
        return [
            Route("/", self.overview),
            Route("/jobs", self.jobs),
            Route("/jobs/{job_id}", self.job),
            Route("/cards", self.cards),
            Route("/decisions", self.decisions),
            Route("/decisions/{decision_id}", self.decision),
            Route("/rules", self.rules),
            Route("/protections", self.protections),
            Route("/engine", self.engine),
            Route("/audit", self.audit),
            Route("/style.css", self._pages.style),
        ]

    async def overview(self, request: Request) -> Response:
        """How the fleet does, and what needs a person."""
        person = self._access.page(request)
        everything = documents.fleet_document(self._engine, person, JobFilter())
        jobs = everything["jobs"]
        broken = [job for job in jobs if job["cases"]]
        decided = documents.decisions_document(self._engine, person, limit=_DECISIONS)
        protections = documents.protections_document(self._engine, person)
        nodes = everything["nodes"]
        tone, answer = self._overall(len(jobs), len(broken), person)
        known = everything["time"] is not None
        return self._pages.render(
            "overview.html",
            request,
            person,
            tone=tone,
            answer=answer,
            time=everything["time"],
            jobs=broken[:_ATTENTION],
            decisions=decided["decisions"],
            numbers={
                "jobs": len(jobs) if known else "unknown",
                "cards": self._held(job["job_id"] for job in jobs) if known else "unknown",
                "breaking": len(broken) if known else "unknown",
                "kept": len(protections["keeps"]),
                "nodes": f"{nodes['lit']} of {nodes['expected']}" if nodes else "unknown",
            },
        )

    def _held(self, jobs: Iterable[str]) -> int:
        """Cards that these jobs hold; one that several hold is one."""
        facts = self._engine.view.facts
        known = {} if facts is None else facts.jobs
        held = (gpu for job in jobs if job in known for gpu in known[job].gpus)
        return len({(gpu.instance, gpu.uuid) for gpu in held})

    def _overall(self, jobs: int, broken: int, person: Person) -> tuple[str, str]:
        facts = self._engine.view.facts
        if facts is None:
            return "warn", _NOTHING_YET
        tone, said = self._counted(jobs, broken, person)
        if not any(block.reason == explain.BLIND for block in self._engine.view.halted):
            return tone, said
        return "warn", f"{said} So it was at {rfc3339(facts.time)}; nothing is known since."

    def _counted(self, jobs: int, broken: int, person: Person) -> tuple[str, str]:
        whose = "" if person.sees_all else "your "
        if not jobs:
            return "", f"No running job{' of yours' if whose else ''} is seen."
        if not broken:
            return "good", f"None of {whose}{jobs} running jobs breaks a rule."
        verb = "breaks" if broken == 1 else "break"
        return "warn", f"{broken} of {whose}{jobs} running jobs {verb} a rule."

    async def jobs(self, request: Request) -> Response:
        """The jobs, filtered, a page of them at a time."""
        person = self._access.page(request)
        query = request.query_params
        wanted = JobFilter(
            user=query.get("user", "").strip(),
            team=query.get("team", ""),
            node=query.get("node", "").strip(),
            rule=query.get("rule", ""),
            broken=query.get("broken") == "1",
        )
        number = page_number(query.get("page"))
        found = documents.fleet_document(
            self._engine,
            person,
            wanted,
            offset=(number - 1) * PER_PAGE,
            limit=PER_PAGE,
            shown=lambda user: self._access.names.shown(person, user),
        )
        total, shown = found["total"], len(found["jobs"])
        first = found["offset"] + 1
        users = self._engine.rulebook.directory.users.values()
        teams = {user.team for user in users if user.team}
        teams &= teams if person.sees_all else set(person.teams)
        return self._pages.render(
            "jobs.html",
            request,
            person,
            jobs=found["jobs"],
            time=found["time"],
            summary=(
                f"{first} to {first + shown - 1} of {total} jobs."
                if shown
                else _NOTHING_YET
                if found["time"] is None
                else f"{total} jobs."
            ),
            wanted=wanted,
            broken=wanted.broken,
            teams=sorted(teams),
            rules=[rule.id for rule in self._engine.rulebook.rules.rules],
            **turning("/jobs", query, number, shown=shown, total=total),
        )

    async def cards(self, request: Request) -> Response:
        """The cards, who holds them, and which are free."""
        person, query = self._access.page(request), request.query_params
        wanted = CardFilter(
            node=query.get("node", "").strip(),
            model=query.get("model", "").strip(),
            free=query.get("free") == "1",
        )
        number = page_number(query.get("page"))
        found = cards_document(
            self._engine, person, wanted, offset=(number - 1) * PER_PAGE, limit=PER_PAGE
        )
        return self._pages.render(
            "cards.html",
            request,
            person,
            cards=found["cards"],
            time=found["time"],
            answer=(
                _NOTHING_YET
                if found["time"] is None
                else f"{found['free']} of {found['all']} cards are free."
            ),
            wanted=wanted,
            **turning("/cards", query, number, shown=len(found["cards"]), total=found["total"]),
        )

    async def job(self, request: Request) -> Response:
        """Why was my job ended, or why not."""
        person = self._access.page(request)
        job_id = request.path_params["job_id"]
        self._access.check_job(person, job_id)
        done = request.query_params.get("done")
        notice = self._kept(job_id, done == "kept")
        if done == "appealed" and self._appeals.taken(job_id):
            notice = APPEALED
        return await self.job_page(request, person, job_id, notice=notice)

    def _kept(self, job_id: str, done: bool) -> str:
        cases = (s.case for s in self._engine.cases.all() if s.case.job_id == job_id)
        until = [self._engine.kept_until(case) for case in cases] if done else []
        latest = max((moment for moment in until if moment is not None), default=None)
        return "" if latest is None else f"The job is kept until {rfc3339(latest)}."

    async def job_page(
        self,
        request: Request,
        person: Person | None,
        job_id: str,
        *,
        status: int = 200,
        notice: str = "",
        refusal: str = "",
        zone: str | None = None,
        link: tuple[str, str] | None = None,
    ) -> Response:
        """The page of a job.

        Args:
            request: that asks for it.
            person: who reads it, or None: who holds a signed link.
            job_id: the job.
            status: of HTTP.
            notice: what was done, to be told first.
            refusal: what was not, and why.
            zone: of its owner, for who holds a link.
            link: where a link's form goes, and the rule that it is about; or None.

        Raises:
            Refusal: 404, nothing is known of it.
        """
        document = explain.job_document(self._engine, job_id)
        if document is None:
            raise Refusal(404, "unknown_job", "no such job has been seen; see GET /v1/jobs")
        facts = self._engine.view.facts
        card = document["target"] == "gpu"
        history = await self._histories.history(
            job_id,
            None if facts is None else facts.jobs.get(job_id),
            self._engine.rulebook.rules.profiles,
        )
        used = zone or self._pages.zone(person)
        return self._pages.render(
            "job.html",
            request,
            person,
            status=status,
            zone=zone,
            document=document,
            answer=_answer(document),
            tone=_tone(document),
            notice=notice,
            refusal=refusal,
            hours=f"{HOURS:g}",
            next=[
                (rule["rule"], item)
                for rule in document["rules"]
                if rule["case"] is not None
                for item in rule["next"]
            ],
            keeps=self._keeps(document, person, link),
            action=link[0] if link is not None else f"/jobs/{quote(job_id, safe='')}/keep",
            appeals=self._appealable(document, person, link),
            appeal_action=(
                f"{link[0]}/appeal"
                if link is not None
                else f"/jobs/{quote(job_id, safe='')}/appeal"
            ),
            by_link=link is not None,
            card=card,
            # Then why is what the reader came for, and not how the job does.
            ended=any(explain.decided(item) for item in document["decisions"]),
            history=history,
            charts=[
                (chart, charts.draw(chart, history, used), charts.latest(chart, history, used))
                for chart in history.charts
            ],
        )

    def _keeps(
        self, document: dict[str, Any], person: Person | None, link: tuple[str, str] | None
    ) -> list[dict[str, str]]:
        """The forms with which the reader may keep the job."""
        owner = link is not None or (person is not None and not person.sees_all)
        if not owner and (person is None or not person.name):
            return []
        found = []
        for item in document["rules"]:
            if item["case"] is None or (link is not None and item["rule"] != link[1]):
                continue
            form = self._form(item["rule"], document["job_id"], owner=owner)
            if form is not None:
                found.append(form)
        return found

    def _appealable(
        self, document: dict[str, Any], person: Person | None, link: tuple[str, str] | None
    ) -> list[str]:
        """The rules to whose end of the job the reader may object."""
        if link is None and (person is None or not person.name):
            return []
        rules = {item["rule"]: None for item in (*document["rules"], *document["decisions"])}
        found = []
        for rule_id in rules if link is None else [link[1]]:
            try:
                self._appeals.subject(rule_id, document["job_id"])
            except Refusal:
                continue
            found.append(rule_id)
        return found

    def _form(self, rule_id: str, job_id: str, *, owner: bool) -> dict[str, str] | None:
        try:
            stored, rule = self._desk.open_case(rule_id, job_id)
        except Refusal:
            return None
        if not rule.enforces:
            return None
        if not owner:
            most = durations.render(MAX_KEEP_SECONDS)
            note = f"Moves the end by up to {most}; what must stay longer belongs on the whitelist."
            return {"rule": rule_id, "most": "2h", "note": note}
        allowance = self._desk.allowance(stored, rule)
        if allowance is None or allowance[1] == 0:
            return None
        may, left = allowance
        most = durations.render(may.keep)
        note = f"Moves the end by up to {most}; {left} of {may.times} left for this run."
        return {"rule": rule_id, "most": most, "note": note}

    async def decisions(self, request: Request) -> Response:
        """Every decision."""
        person = self._access.page(request)
        found = documents.decisions_document(
            self._engine, person, before=moment(request.query_params.get("before"))
        )
        older = f"/decisions?{urlencode({'before': found['before']})}" if found["before"] else ""
        return self._pages.render(
            "decisions.html", request, person, decisions=found["decisions"], older=older
        )

    async def decision(self, request: Request) -> Response:
        """One reclaim, whole: from its first sample to the memory that came back."""
        person = self._access.page(request)
        document = decision_audit(
            self._engine, self._access, person, request.path_params["decision_id"]
        )
        return self._pages.render("decision.html", request, person, document=document)

    async def rules(self, request: Request) -> Response:
        """Every rule, what it does, and its cases."""
        person = self._access.page(request)
        document = documents.rules_document(self._engine, person)
        return self._pages.render("rules.html", request, person, document=document)

    async def protections(self, request: Request) -> Response:
        """Who is protected, from what, until when, why, and by whom."""
        person = self._access.page(request)
        document = documents.protections_document(self._engine, person)
        return self._pages.render("protections.html", request, person, document=document)

    async def engine(self, request: Request) -> Response:
        """How the engine does."""
        person = self._access.page(request)
        return self.engine_page(request, person, notice=self._done(request.query_params))

    def _done(self, query: Mapping[str, str]) -> str:
        """What was done, while it is still so: pages are loaded again, and links passed on."""
        done, rule, engine = query.get("done"), query.get("rule", ""), self._engine
        paused = engine.pauses.current() is not None
        if done == "paused" and paused:
            return "Enforcement is paused."
        if paused or switched_on(engine.kill_switch) is not False:
            return ""
        if done == "resumed":
            return "Enforcement goes on from the next tick."
        held = {item.rule_id for item in engine.trials.held}
        if done == "rule" and engine.rulebook.rule(rule) is not None and rule not in held:
            return f"The rule {rule} enforces again from the next tick."
        return ""

    def engine_page(
        self,
        request: Request,
        person: Person,
        *,
        status: int = 200,
        notice: str = "",
        refusal: str = "",
    ) -> Response:
        """The page of the engine; the arguments are as for a job's page."""
        health = documents.health_document(self._engine)
        tone, answer = _verdict(health)
        return self._pages.render(
            "engine.html",
            request,
            person,
            status=status,
            health=health,
            tone=tone,
            answer=answer,
            notice=notice,
            refusal=refusal,
        )

    async def audit(self, request: Request) -> Response:
        """What happened, and who changed what."""
        person = self._access.page(request, Role.OPERATOR)
        people = request.query_params.get("people") == "1"
        before = whole(request.query_params.get("before"), "before")
        found = documents.audit_document(self._engine, before=before, people=people)
        chosen = {"people": "1"} if people else {}
        older = (
            f"/audit?{urlencode({**chosen, 'before': found['before']})}" if found["before"] else ""
        )
        return self._pages.render(
            "audit.html", request, person, events=found["events"], people=people, older=older
        )


def turning(
    path: str, query: Mapping[str, str], number: int, *, shown: int, total: int
) -> dict[str, Any]:
    """Links to the pages before and after one of a filtered list."""
    kept = {name: value for name, value in query.items() if name != "page" and value}

    def turned(page: int) -> str:
        return f"{path}?{urlencode({**kept, 'page': page})}"

    more = shown > 0 and (number - 1) * PER_PAGE + shown < total
    return {
        "newer": turned(number - 1) if number > 1 else "",
        "older": turned(number + 1) if more else "",
        "turn": f"page {number} of {max(1, -(-total // PER_PAGE))}",
    }


def _tone(document: dict[str, Any]) -> str:
    states = [item["state"] for item in document["decisions"]]
    states += [rule["case"]["state"] for rule in document["rules"] if rule["case"]]
    if any(_TONES.get(state) == "bad" for state in states):
        return "bad"
    if any(rule["case"] and rule["case"]["detected_at"] for rule in document["rules"]):
        return "warn"
    return "good" if document["running"] and document["job"]["fresh"] else ""


def _answer(document: dict[str, Any]) -> str:
    """Why, or why not; and the earliest end, where there may be one."""
    said = explain.answer(document)
    broken = [rule for rule in document["rules"] if rule["case"] and rule["case"]["not_before"]]
    if not any(rule["case"]["detected_at"] for rule in broken):
        return said
    # A rule that is not yet counted as broken may end it before one that is, and that was kept.
    ends = [rule["case"]["not_before"] for rule in broken]
    return f"{said} The earliest end is {min(ends)}."


def _verdict(health: dict[str, Any]) -> tuple[str, str]:
    if health["problems"]:
        return "bad", f"The engine has a problem: {'; '.join(health['problems'])}"
    enforcement = health["enforcement"]
    if enforcement["paused"] is not None:
        return "warn", "The engine works; a person has paused enforcement, so that no job is ended."
    if enforcement["halted"]:
        why = "; ".join(block["sentence"] for block in enforcement["halted"])
        return "warn", f"The engine works; no job is ended now: {why}."
    if health["agents"]["url"] is None or not health["alertmanager"]["urls"]:
        return "warn", "The engine works and judges every job; it is not set up to end any."
    return "good", "The engine works: it judges every job, and may end those that must end."
