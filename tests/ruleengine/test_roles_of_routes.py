"""Every route with the role that it takes: tried by everybody, on somebody else's job.

A route that is not in the table fails: whoever adds one says whom it is for.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from tests.ruleengine.browsing import KEY, Series
from tests.ruleengine.engines import World, running
from tests.ruleengine.schedules import scheduler, schedules
from tests.ruleengine.worlds import Job

from gpuwarden.ruleengine.app import EngineApp
from gpuwarden.ruleengine.cases import CaseState
from gpuwarden.ruleengine.roles import Role
from gpuwarden.ruleengine.sign_ins import Token

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

OPEN = "open"
"""Whoever reaches the port: nothing about people, or the way in."""
SECRET = "secret"
"""Whoever shows a secret of its own: Alertmanager, nodes, holders of a link or a ticket."""
THEIRS, SHARED = "theirs", "shared"
"""Whose job it is, and operators; every role, each with what is theirs to see."""
ROUTES: dict[tuple[str, str], str] = {
    ("GET", "/metrics"): OPEN,
    ("GET", "/-/healthy"): OPEN,
    ("GET", "/-/ready"): OPEN,
    ("GET", "/style.css"): OPEN,
    ("GET", "/sign-in"): OPEN,
    ("POST", "/sign-in"): OPEN,
    ("GET", "/v1/openapi.json"): OPEN,
    ("GET", "/v1/sd/prometheus"): OPEN,
    ("GET", "/keep/{token}"): SECRET,
    ("POST", "/keep/{token}"): SECRET,
    ("POST", "/keep/{token}/appeal"): SECRET,
    ("POST", "/v1/notify/{channels}"): SECRET,
    ("POST", "/v1/nodes"): SECRET,
    ("POST", "/v1/nodes/leave"): SECRET,
    ("GET", "/"): SHARED,
    ("GET", "/jobs"): SHARED,
    ("GET", "/cards"): SHARED,
    ("GET", "/decisions"): SHARED,
    ("GET", "/rules"): SHARED,
    ("GET", "/protections"): SHARED,
    ("GET", "/engine"): SHARED,
    ("GET", "/shares"): SHARED,
    ("GET", "/budgets"): SHARED,
    ("GET", "/queue"): SHARED,
    ("GET", "/calendar"): SHARED,
    ("GET", "/calendar.ics"): SHARED,
    ("GET", "/receipts"): SHARED,
    ("POST", "/sign-out"): SHARED,
    ("GET", "/v1/jobs"): SHARED,
    ("GET", "/v1/fleet"): SHARED,
    ("GET", "/v1/cards"): SHARED,
    ("GET", "/v1/matches/{word}"): SHARED,
    ("GET", "/v1/decisions"): SHARED,
    ("GET", "/v1/rules"): SHARED,
    ("GET", "/v1/protections"): SHARED,
    ("GET", "/v1/health"): SHARED,
    ("GET", "/v1/enforcement"): SHARED,
    ("GET", "/v1/trials"): SHARED,
    ("GET", "/v1/drills"): SHARED,
    ("GET", "/v1/drills/{drill_id}"): SHARED,
    ("GET", "/v1/shares"): SHARED,
    ("GET", "/v1/names"): SHARED,
    ("GET", "/v1/budgets"): SHARED,
    ("GET", "/v1/leaves"): SHARED,
    ("GET", "/jobs/{job_id}"): THEIRS,
    ("POST", "/jobs/{job_id}/keep"): THEIRS,
    ("POST", "/jobs/{job_id}/appeal"): THEIRS,
    ("GET", "/decisions/{decision_id}"): THEIRS,
    ("GET", "/v1/jobs/{job_id}"): THEIRS,
    ("GET", "/v1/jobs/{job_id}/history"): THEIRS,
    ("GET", "/v1/decisions/{decision_id}"): THEIRS,
    ("GET", "/v1/decisions/{decision_id}/audit"): THEIRS,
    ("GET", "/v1/leaves/{leave_id}"): THEIRS,
    ("POST", "/v1/keeps"): THEIRS,
    ("POST", "/v1/appeals"): THEIRS,
    ("POST", "/v1/leaves"): Role.SCHEDULER,
    ("DELETE", "/v1/leaves/{leave_id}"): Role.SCHEDULER,
    ("GET", "/audit"): Role.OPERATOR,
    ("GET", "/names"): Role.OPERATOR,
    ("POST", "/names/open"): Role.OPERATOR,
    ("POST", "/names/close"): Role.OPERATOR,
    ("GET", "/v1/audit"): Role.OPERATOR,
    ("GET", "/v1/nodes"): Role.OPERATOR,
    ("POST", "/v1/nodes/forget"): Role.OPERATOR,
    ("POST", "/v1/names/open"): Role.OPERATOR,
    ("POST", "/v1/names/close"): Role.OPERATOR,
    ("POST", "/v1/regrets"): Role.OPERATOR,
    ("POST", "/engine/pause"): Role.ADMIN,
    ("POST", "/engine/resume"): Role.ADMIN,
    ("POST", "/v1/enforcement/pause"): Role.ADMIN,
    ("POST", "/v1/enforcement/resume"): Role.ADMIN,
    ("POST", "/v1/drills"): Role.ADMIN,
}
SECRETS = {role: f"token-of-{role}-0001" for role in Role}
PEOPLE = {
    Role.OWNER: "alice",
    Role.SCHEDULER: "queue",
    Role.OPERATOR: "olga",
    Role.ADMIN: "root",
}
WEB = "web:\n  tokens:\n" + "".join(
    f"  - {{name: {name}, role: {role}, file: unread}}\n" for role, name in PEOPLE.items()
)
VICTIM, HELD, ENDED, RUN = "zebedee", "proc-hidden-1", "proc-hidden-0", "hidden-run"
REFUSED = {401, 403, 404, 410}
WAY_IN = ("POST", "/sign-in")


@contextlib.asynccontextmanager
async def fleet(servers: World) -> AsyncIterator[tuple[World, EngineApp]]:
    """Somebody else has one job that was ended and one that breaks a rule; alice's is busy."""
    with scheduler(servers.clock) as (_, sink):
        servers.web = f"{WEB}scheduler: {{url: {sink.url}}}\n"
        servers.fleet.jobs = [
            Job("proc-own", utilization=0.8),
            *(
                Job(
                    name,
                    user=VICTIM,
                    uuid=f"GPU-{number}",
                    activity={"cpu": 1_799_990_000.0 - number},
                    run={"run_id": f"{RUN}-{number}", "model": "yolov8m"},
                )
                for number, name in enumerate((ENDED, HELD))
            ),
        ]
        text = (servers.folder / "directory.yaml").read_text()
        (servers.folder / "directory.yaml").write_text(
            f"{text}  {VICTIM}: {{slack: U0ZEB0001, team: secret-team}}\n"
        )
        async with running(servers) as world:
            while world.engine.ledger.job_decisions(ENDED) == []:
                await world.tick()
            await world.settled()
            world.fleet.jobs = [job for job in world.fleet.jobs if job.job_id != ENDED]
            await world.tick()
            assert world.state(HELD) in (CaseState.DUE, CaseState.NOTIFIED)
            told = schedules(sink.url, world.clock)
            yield (
                world,
                EngineApp(
                    world.engine,
                    world.hop,
                    notify_token="notify-token-0001",
                    operator_token=None,
                    ticket_key=KEY,
                    node_token="node-token-00001",
                    tokens=[Token(PEOPLE[role], role, SECRETS[role]) for role in Role],
                    series=Series(),
                    schedules=told,
                ),
            )
            await told.aclose()


@contextlib.asynccontextmanager
async def browser(app: EngineApp, role: Role | None) -> AsyncIterator[httpx.AsyncClient]:
    """Somebody's browser, signed in, or nobody's."""
    transport = httpx.ASGITransport(app=app.starlette())
    async with httpx.AsyncClient(transport=transport, base_url="http://engine:9837") as client:
        if role is not None:
            own = {"Sec-Fetch-Site": "same-origin"}
            answer = await client.post("/sign-in", data={"token": SECRETS[role]}, headers=own)
            assert answer.status_code == 303
        yield client


def served(app: EngineApp) -> set[tuple[str, str]]:
    """Method and path of everything that is served."""
    return {
        (method, getattr(route, "path", ""))
        for route in app.starlette().routes
        for method in getattr(route, "methods", ()) or ()
        if method != "HEAD"
    }


def allowed(least: str, role: Role | None) -> bool:
    """Whether a role may use a route, on a job that is not theirs."""
    if least == OPEN:
        return True
    if role is None or least == SECRET:
        return False
    if least == SHARED:
        return True
    return role.includes(Role.OPERATOR if least == THEIRS else Role(least))


async def ask(
    client: httpx.AsyncClient, route: tuple[str, str], role: Role | None, values: Mapping[str, str]
) -> httpx.Response:
    """Use a route as somebody who knows its parameters: by the page's form, or by the token."""
    method, path = route
    asked = path.format(**values)
    body = {
        "rule": "idle-held",
        "job_id": HELD,
        "for": "30m",
        "reason": "why not",
        "decision_id": values["decision_id"],
        "node": "127.0.0.1",
        "address": "node7:9835",
        "at": "step",
        "then": "hold",
        "deadline_seconds": 60,
        "cause": "priority",
        "key": "k",
    }
    if path == "/v1/leaves":
        body = {k: body[k] for k in ("job_id", "at", "then", "deadline_seconds", "cause", "key")}
        body["reason"] = "why not"
    if path.startswith("/v1/"):
        bearer = {} if role is None else {"Authorization": f"Bearer {SECRETS[role]}"}
        data: dict[str, Any] = {} if method == "GET" else {"json": body}
        return await client.request(method, asked, headers=bearer, **data)
    if method == "GET":
        return await client.get(asked)
    found = re.search(r'name="form" value="([^"]+)"', (await client.get("/rules")).text)
    fields = {key: str(body[key]) for key in ("rule", "for", "reason")}
    if path.startswith(("/engine/", "/names/")):
        del fields["rule"]
    return await client.post(
        asked,
        data={**fields, "form": found[1] if found else ""},
        headers={"Sec-Fetch-Site": "same-origin"},
    )


def test_every_route_says_whom_it_is_for(servers: World) -> None:
    """In the table above, and where the API describes itself likewise there."""

    async def story() -> None:
        async with fleet(servers) as (_, app):
            assert served(app) == set(ROUTES)
            for operation in app.operations:
                least = ROUTES[operation.method, operation.path]
                if operation.least is None:
                    assert least in (OPEN, SECRET), operation.path
                else:
                    owners = operation.least is Role.OWNER
                    assert least in ((SHARED, THEIRS) if owners else (operation.least,)), operation

    asyncio.run(story())


@pytest.mark.parametrize("role", [None, *Role], ids=lambda role: str(role or "nobody"))
def test_nobody_gets_further_than_their_role(servers: World, role: Role | None) -> None:
    """By no route, and who is refused has changed nothing."""

    async def story() -> None:
        async with fleet(servers) as (world, app), browser(app, role) as client:
            (decision,) = world.engine.ledger.job_decisions(ENDED)
            values = {
                "job_id": HELD,
                "decision_id": decision.id,
                "word": "proc-hidden",
                "drill_id": "1",
                "leave_id": "none",
                "channels": "slack",
                "token": "x.y",
            }
            wrong = []
            for route in sorted(ROUTES, key=lambda route: (ROUTES[route] == SHARED, route)):
                before = _state(world)
                answer = await ask(client, route, role, values)
                told = answer.status_code
                # What is not there, or not set up here, is refused to everybody alike.
                none = "not in engine.yaml" if "engine.yaml" in answer.text else ""
                none = (
                    none or {"drill_id", "leave_id"} & set(_parameters(route[1])) or route == WAY_IN
                )
                denied = told in REFUSED or "next=" in answer.headers.get("location", "")
                if denied == allowed(ROUTES[route], role) and not (denied and none):
                    wrong.append((route, told, answer.text[:200]))
                if "no-store" not in answer.headers["cache-control"] and route[1] != "/style.css":
                    wrong.append((route, told, "may be kept by a cache"))
                if answer.headers["x-content-type-options"] != "nosniff":
                    wrong.append((route, told, "may be taken for another type"))
                if denied and _state(world) != before:
                    wrong.append((route, told, "changed something"))
                # Whoever may read /metrics is decided by web.metrics_token_file.
                if role in (None, Role.OWNER, Role.SCHEDULER) and route[1] != "/metrics":
                    wrong += [(route, told, word) for word in _leaked(answer) if told < 400]
            assert wrong == [], "\n".join(map(str, wrong))

    asyncio.run(story())


def _parameters(path: str) -> list[str]:
    return re.findall(r"\{(\w+)\}", path)


def _state(world: World) -> list[tuple[Any, ...]]:
    """Everything that somebody could have changed."""
    tables = ("events", "keeps", "pauses", "decisions", "objections", "leaves")
    known = {row[0] for row in world.engine.ledger.rows("SELECT name FROM sqlite_master")}
    assert known >= {"events", "keeps", "pauses", "decisions"}
    return [
        (name, world.engine.ledger.rows(f"SELECT COUNT(*) FROM {name}"))  # noqa: S608
        for name in tables
        if name in known
    ]


def _leaked(answer: httpx.Response) -> set[str]:
    """What is none of their business: whose jobs others have, and what these are called."""
    return {word for word in (VICTIM, HELD, ENDED, RUN) if word in answer.text}
