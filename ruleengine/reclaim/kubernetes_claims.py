"""What names one pod, and what was decided about it, in the form that the ledger keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from gpuwarden.errors import RefusedAction
from gpuwarden.platforms.kubernetes import Reference
from gpuwarden.ruleengine.reclaim.kubernetes_controllers import Act

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_OTHERS = 256


@dataclass(frozen=True, slots=True)
class PodClaim:
    """One pod, and how it is ended.

    Attributes:
        namespace: of it.
        pod: which.
        act: what is done.
        target: what it is done to: a controller, or for an eviction the pod's own controller, which
            may bring another one; None for a pod that nothing manages.
        root_uid: of the owner whose pods all end with it; empty where only the pod does.
        others: uids of those pods, and for an eviction of the pods beside it.
    """

    namespace: str
    pod: Reference
    act: Act
    target: Reference | None = None
    root_uid: str = ""
    others: frozenset[str] = frozenset()

    def known(self, uid: str) -> bool:
        """Whether a pod was there when this was decided."""
        return uid == self.pod.uid or uid in self.others

    def encode(self) -> dict[str, str | int | None]:
        """For the ledger."""
        target = self.target
        return {
            "namespace": self.namespace,
            "pod": self.pod.name,
            "uid": self.pod.uid,
            "act": self.act.value,
            "target_version": target.api_version if target else None,
            "target_kind": target.kind if target else None,
            "target_name": target.name if target else None,
            "target_uid": target.uid if target else None,
            "root_uid": self.root_uid,
            "others": ",".join(sorted(self.others)),
        }

    @classmethod
    def decode(cls, identity: Mapping[str, str | int | None]) -> Self:
        """From the ledger.

        Raises:
            RefusedAction: `bad_claim`: it was not written by `encode`.
        """
        try:
            words = {name: str(value) for name, value in identity.items() if value is not None}
            target = None
            if "target_uid" in words:
                target = Reference(
                    words["target_version"],
                    words["target_kind"],
                    words["target_name"],
                    words["target_uid"],
                )
            return cls(
                namespace=words["namespace"],
                pod=Reference("v1", "Pod", words["pod"], words["uid"]),
                act=Act(words["act"]),
                target=target,
                root_uid=words["root_uid"],
                others=frozenset(filter(None, words["others"].split(","))),
            )
        except (KeyError, ValueError) as error:
            raise RefusedAction("bad_claim", f"not a claim on a pod: {error}") from error
