"""Tickets: what an owner's notice carries so that its reader may keep the job, and nothing else.

A ticket is a MAC over rule and attempt; it cannot be guessed, and it is worthless for another job
or another rule. It is read from the notice, so whoever holds it received the notice.
"""

from __future__ import annotations

import base64
import hashlib
import hmac

_LENGTH = 27


def key_from(secret: str) -> bytes:
    """The key of tickets, derived from a secret that serves another purpose as well."""
    return hmac.digest(secret.encode(), b"gpuwarden keep tickets v1", "sha256")


def issue(key: bytes | None, rule_id: str, job_id: str) -> str:
    """The ticket of a rule and an attempt; empty where there is no key."""
    if key is None:
        return ""
    mac = hmac.new(key, f"{rule_id}\n{job_id}".encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(mac).decode()[:_LENGTH]


def valid(key: bytes | None, rule_id: str, job_id: str, ticket: str) -> bool:
    """Whether a ticket is that of the rule and the attempt; takes the same time either way."""
    if key is None:
        return False
    return hmac.compare_digest(issue(key, rule_id, job_id).encode(), ticket.encode())
