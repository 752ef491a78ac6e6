"""Whether our controller is there: a Lease that it renews, and that submissions look at. Pure.

A Job waits behind a gate for notices only while somebody is there to open it.
"""

from __future__ import annotations

import datetime as dt
from typing import TYPE_CHECKING, Any, Final

from gpuwarden.platforms.kubernetes import value_at
from gpuwarden.scheduling.kueue import names

if TYPE_CHECKING:
    from gpuwarden.platforms.kubernetes import Json
    from gpuwarden.scheduling.policies import Policy

SECONDS: Final = 60
"""For which a Lease speaks."""
RENEW_SECONDS: Final = 15.0


def is_held(found: Json | None, now: float) -> bool:
    """Whether somebody holds a Lease now."""
    until = held_until(found)
    return until is not None and now < until


def holder_of(found: Json | None) -> str:
    """Who holds it, or held it last; empty where nobody did."""
    holder = value_at(found, "spec.holderIdentity") if found is not None else None
    return holder if isinstance(holder, str) else ""


def held_until(found: Json | None) -> float | None:
    """Unix time at which it ends, or None where it cannot be read."""
    if found is None or not holder_of(found):
        return None
    renewed = value_at(found, "spec.renewTime")
    seconds = value_at(found, "spec.leaseDurationSeconds")
    try:
        moment = dt.datetime.fromisoformat(renewed).timestamp()
    except (TypeError, ValueError):
        return None
    return moment + (seconds if isinstance(seconds, int) else SECONDS)


def lease_spec(holder: str, now: float, *, taken: float, changes: int) -> dict[str, Any]:
    """What a holder writes.

    Args:
        holder: who.
        now: Unix time.
        taken: Unix time at which it took it.
        changes: how often it has changed hands.
    """
    return {
        "holderIdentity": holder,
        "leaseDurationSeconds": SECONDS,
        "renewTime": _moment(now),
        "acquireTime": _moment(taken),
        "leaseTransitions": changes,
    }


def lease_body(policy: Policy, spec: dict[str, Any]) -> dict[str, Any]:
    """A new Lease.

    Args:
        policy: whose; two of one namespace have two.
        spec: empty where nobody holds it.
    """
    name, space = names.controller_name(policy), policy.kueue.namespace
    return {
        "apiVersion": names.LEASES.api_version,
        "kind": "Lease",
        "metadata": {"name": name, "namespace": space, "labels": names.marks(policy)},
        "spec": spec,
    }


def _moment(now: float) -> str:
    """A MicroTime."""
    return dt.datetime.fromtimestamp(now, dt.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def stamp(now: float) -> str:
    """A time as conditions have it."""
    return dt.datetime.fromtimestamp(now, dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
