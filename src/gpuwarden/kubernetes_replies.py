"""What a Kubernetes API server's answers stand for: lists, changes, errors with their remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, NoReturn

from gpuwarden.errors import RefusedAction, ServiceUnavailable

if TYPE_CHECKING:
    from gpuwarden.platforms.kubernetes import Json

_MAX_MESSAGE: Final = 500
_POLICIES: Final = ("admission webhook", "ValidatingAdmissionPolicy '")
"""By whose words a refusal is the cluster's own, and neither lack of rights nor a mistake."""


class ServerFault(ServiceUnavailable):
    """The server has answered, with a fault: of this request, perhaps, and of no other."""


class Listing(NamedTuple):
    """All objects of a kind, and as of when.

    Attributes:
        items: the objects; as the API lists them, without their kind.
        version: from which a watch goes on.
    """

    items: list[Json]
    version: str


class Change(NamedTuple):
    """What a watch tells.

    Attributes:
        event: ADDED, MODIFIED, DELETED, or BOOKMARK (nothing but a newer version).
        found: the object as it is now, or as it last was.
    """

    event: str
    found: Json

    @property
    def version(self) -> str:
        """From which a watch goes on after this."""
        return version_of(self.found.get("metadata"))


def version_of(metadata: object) -> str:
    """The version in an object's or a list's metadata, or an empty string."""
    return str(metadata.get("resourceVersion") or "") if isinstance(metadata, dict) else ""


def refuse(status: int, said: Json, *, role: str) -> NoReturn:
    """Raise the error that an answer stands for.

    Args:
        status: of HTTP.
        said: the answer.
        role: the manifest of what the asker may do.

    Raises:
        RefusedAction: trying again changes nothing.
        ServiceUnavailable: it may help.
    """
    message = " ".join(str(said.get("message") or f"HTTP {status}").split())[:_MAX_MESSAGE]
    match status:
        case 404 | 410:
            raise RefusedAction("gone", message)
        case 409:
            raise RefusedAction("conflict", message)
        case 403 | 422 if any(words in message for words in _POLICIES):
            raise RefusedAction("denied", f"the cluster's own policy refused it: {message}")
        case 403:
            raise RefusedAction("forbidden", f"{message}; add this to {role}")
        case 429 if _is_budget(said):
            raise RefusedAction("disruption_budget", message)
        case 400 | 405 | 415 | 422:
            raise RefusedAction("invalid", f"the API server refused it: {message}")
        case 401:
            raise ServiceUnavailable(
                "the API server does not know the engine's credentials (HTTP 401)"
            )
        case _:
            raise ServerFault(f"the API server answered HTTP {status}: {message}")


def _is_budget(said: Json) -> bool:
    """Whether a 429 speaks of a disruption budget, and not of too many requests."""
    details = said.get("details")
    causes = items_of(details, "causes") if isinstance(details, dict) else []
    return any(cause.get("reason") == "DisruptionBudget" for cause in causes)


def items_of(found: Json, name: str) -> list[Json]:
    """A list of objects in an answer; nothing where it is absent.

    Raises:
        ServiceUnavailable: it is something else.
    """
    items = found.get(name)
    if items is None:
        return []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise ServiceUnavailable(f"the API server's answer has no list of {name}")
    return items
