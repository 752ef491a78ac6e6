"""Nodes over HTTP: registration, the list for people, and Prometheus' service discovery."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter
from starlette.responses import JSONResponse, Response

from gpuwarden import node_api
from gpuwarden.node_api import Goodbye, Registration, RegistrationRefused, Target
from gpuwarden.refusals import Refusal, authorise, read_json
from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.api_engine_models import (
    ForgetRequest,
    NodeList,
    Nothing,
    Registered,
    TargetGroup,
)
from gpuwarden.ruleengine.bodies import word
from gpuwarden.ruleengine.nodes import node_documents
from gpuwarden.ruleengine.operations import Operation
from gpuwarden.ruleengine.roles import Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from starlette.requests import Request

    from gpuwarden.ruleengine.access import Access
    from gpuwarden.ruleengine.engine import Engine
    from gpuwarden.ruleengine.nodes import Nodes

NODES_SCHEMA = "gpuwarden.nodes/1"
_STATUS = {
    "unknown_node": 404,
    "foreign_address": 409,
    "not_allowed": 403,
    "too_many": 507,
    "too_often": 429,
}


class NodeRoutes:
    """Handlers over one engine's nodes.

    Args:
        engine: whose view tells which nodes are lit.
        node_token: the nodes', or None: none can register.
        access: who may see them, and have one forgotten.
    """

    def __init__(self, engine: Engine, *, node_token: str | None, access: Access) -> None:
        self._engine = engine
        self._node_token = node_token
        self._access = access

    def operations(self) -> list[Operation]:
        """What is offered."""
        by_nodes = "Takes the token of nodes.registration.token_file."
        closed = {404: "No node can register: engine.yaml has no nodes.registration."}
        malformed = {400: "The body cannot be read, or names no address.", 413: "It is too large."}
        return [
            Operation(
                "POST",
                node_api.REGISTER_PATH,
                self.register,
                "A node makes itself known, or is heard again.",
                TypeAdapter(Registered),
                body=TypeAdapter(dict[str, Any]),
                least=None,
                opened_by=by_nodes,
                refusals={
                    **closed,
                    **malformed,
                    409: "The address is that of another node.",
                    429: "It comes too often.",
                    507: "Too many nodes are registered.",
                },
            ),
            Operation(
                "GET",
                node_api.REGISTER_PATH,
                self.nodes,
                "Which nodes there are, which should be, and which are lit.",
                TypeAdapter(NodeList),
                least=Role.OPERATOR,
            ),
            Operation(
                "POST",
                node_api.LEAVE_PATH,
                self.leave,
                "A node says goodbye.",
                TypeAdapter(Nothing),
                body=TypeAdapter(dict[str, Any]),
                least=None,
                opened_by=by_nodes,
                refusals={**malformed, 404: "The node is not known.", 409: "It is another's."},
            ),
            Operation(
                "POST",
                node_api.FORGET_PATH,
                self.forget,
                "An operator says that a node will not come back.",
                TypeAdapter(Nothing),
                body=TypeAdapter(ForgetRequest),
                least=Role.OPERATOR,
                refusals={**malformed, 404: "The node is not known."},
            ),
            Operation(
                "GET",
                node_api.DISCOVERY_PATH,
                self.discovery,
                "Every registered node as a target, for Prometheus' HTTP service discovery.",
                TypeAdapter(list[TargetGroup]),
                least=None,
                refusals=closed,
            ),
        ]

    async def register(self, request: Request) -> Response:
        """A node makes itself known, or is heard again."""
        nodes = self._open()
        authorise(request, self._node_token, "nodes.registration.token_file")
        document = await read_json(request, node_api.MAX_BYTES)
        peer = request.client.host if request.client is not None else ""
        _told(lambda: nodes.register(Registration.decode(document), peer=peer))
        return JSONResponse({"heartbeat_seconds": nodes.heartbeat})

    async def leave(self, request: Request) -> Response:
        """A node says goodbye."""
        nodes = self._open()
        authorise(request, self._node_token, "nodes.registration.token_file")
        document = await read_json(request, node_api.MAX_BYTES)
        _told(lambda: nodes.leave(Goodbye.decode(document)))
        return JSONResponse({})

    async def forget(self, request: Request) -> Response:
        """An operator says that a node will not come back: {address, reason?}."""
        nodes = self._open()
        person = self._access.sign_ins.changer(request, Role.OPERATOR)
        document = await read_json(request, node_api.MAX_BYTES)
        address = document.get("address") if isinstance(document, dict) else None
        if not isinstance(document, dict) or not isinstance(address, str):
            raise Refusal(400, "malformed", "address is missing")
        reason = word(document, "reason") if document.get("reason") else ""
        _told(
            lambda: nodes.forget(
                str(Target.parse(address)), by=person.name, role=person.role.value, reason=reason
            )
        )
        return JSONResponse({})

    async def nodes(self, request: Request) -> Response:
        """Which nodes there are, which should be, and which are lit."""
        self._access.api(request, Role.OPERATOR)
        return JSONResponse(nodes_document(self._engine))

    async def discovery(self, _request: Request) -> Response:
        """Every node as a target: always all of them, as Prometheus asks for."""
        return JSONResponse(self._open().targets())

    def _open(self) -> Nodes:
        nodes = self._engine.nodes
        if nodes is None:
            # An empty list would make Prometheus drop its targets.
            raise Refusal(404, "closed", "engine.yaml has no nodes.registration: none can register")
        return nodes


def nodes_document(engine: Engine) -> dict[str, Any]:
    """Every node that is known by name, as of the last completed tick."""
    facts = engine.view.facts
    lit = dict.fromkeys(facts.lit_names, True) if facts is not None else {}
    expected = facts.expected_names if facts is not None else ()
    documents = node_documents(engine.nodes, lit=lit, expected=expected)
    times = ("registered_at", "seen_at", "left_at")
    return {
        "schema": NODES_SCHEMA,
        "time": None if facts is None else rfc3339(facts.time),
        "expected": None if facts is None else facts.expected_nodes,
        "lit": None if facts is None else facts.lit_nodes,
        "nodes": [
            {
                key: rfc3339(value) if key in times and isinstance(value, float) else value
                for key, value in document.items()
            }
            for document in documents
        ],
    }


def _told(act: Callable[[], object]) -> None:
    try:
        act()
    except RegistrationRefused as error:
        raise Refusal(_STATUS.get(error.reason, 400), error.reason, str(error)) from error
