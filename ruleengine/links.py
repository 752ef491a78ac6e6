"""Signed links: what an owner's notice carries, so that its reader sees the job and may keep it.

A link is bound to the rule, the attempt, its run and the owner, and has an end. To open it changes
nothing, since mail scanners open every link; only its form keeps the job.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from itsdangerous import BadData, URLSafeSerializer

if TYPE_CHECKING:
    from gpuwarden.ruleengine.cases import Case

SIGNED = {"key_derivation": "hmac", "digest_method": hashlib.sha256}
"""How everything that is handed out is signed: HMAC with SHA-256, a key for each purpose."""
LIFETIME_SECONDS = 7 * 86400.0
"""A link outlives the announced end by this much, so that it still explains what has happened."""


@dataclass(frozen=True, slots=True)
class Claim:
    """What a link says.

    Attributes:
        rule_id, job_id: the case.
        run_id: of the training, or None.
        user: to whom it was sent.
        until: Unix time of its end.
    """

    rule_id: str
    job_id: str
    run_id: str | None
    user: str
    until: int


class Links:
    """Makes and reads signed links.

    Args:
        key: the secret, or None: there are no links.
        external_url: of the engine, as people's browsers see it.
    """

    def __init__(self, key: bytes | None, external_url: str) -> None:
        self._signer = (
            None
            if key is None
            else URLSafeSerializer(key, salt="gpuwarden keep link", signer_kwargs=SIGNED)
        )
        self._url = external_url

    def url(self, case: Case, after: float) -> str:
        """The link of a case; empty where there is no key.

        The same case has the same link at every call: a notice is not changed by time alone.

        Args:
            case: that was detected.
            after: seconds from its detection to the announced end.
        """
        if self._signer is None:
            return ""
        found = case.detected_at if case.detected_at is not None else case.opened_at
        until = int(found + after + LIFETIME_SECONDS)
        token = self._signer.dumps([case.rule_id, case.job_id, case.run_id, case.user, until])
        return f"{self._url}/keep/{token}"

    def read(self, token: str, *, now: float) -> Claim | None:
        """What a link says, or None for one that is not ours or has ended.

        Args:
            token: the last part of its path.
            now: Unix time.
        """
        if self._signer is None:
            return None
        try:
            claim = Claim(*self._signer.loads(token))
        except (BadData, TypeError):
            return None
        return claim if claim.until > now else None
