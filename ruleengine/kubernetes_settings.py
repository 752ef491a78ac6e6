"""The `kubernetes` part of engine.yaml: which API server, in whose name, and what it may end."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field, StringConstraints, field_validator
from pydantic_core import PydanticCustomError

from gpuwarden.fields import Seconds, Strict, as_tuple
from gpuwarden.ruleengine.web_settings import File

SYSTEM_NAMESPACES = frozenset({"kube-system", "kube-public", "kube-node-lease"})
"""Never touched, whatever the file says."""

Namespace = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
"""Name of a namespace."""
_FIELD = r"^(spec|metadata\.annotations)(\.[A-Za-z0-9_-]+)+$"


class ControllerSettings(Strict):
    """A controller of your own, and how it is told to end its pods and start no more."""

    kind: Annotated[
        str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9]{0,62}\.[a-z0-9][a-z0-9.-]{0,200}$")
    ]
    """Kind and group, such as Workflow.argoproj.io."""
    field: Annotated[str, StringConstraints(pattern=_FIELD)]
    """What is set, such as spec.shutdown."""
    value: bool | int | str = True
    """What it is set to."""


class KubernetesSettings(Strict):
    """How pods are ended: through their controllers, at the API server."""

    kubeconfig: File | None = None
    """In whose name: a kubeconfig; by default the engine's own service account in its pod."""
    context: str | None = None
    """Of the kubeconfig; its current one by default."""
    namespaces: Annotated[tuple[Namespace, ...], BeforeValidator(as_tuple)] = ()
    """Where pods may be ended; everywhere by default, but never in kube-system and its like."""
    timeout: Annotated[Seconds, Field(gt=0, le=60)] = 10.0
    """For one request."""
    respect_disruption_budgets: bool = True
    """Whether a PodDisruptionBudget may keep a pod without a controller from being ended. Users can
    write one; false deletes such pods directly, which needs the right to delete pods. Suspending or
    scaling a controller never asks them."""
    controllers: Annotated[tuple[ControllerSettings, ...], BeforeValidator(as_tuple)] = ()
    """Controllers of your own, beside those that are known (docs/kubernetes.md)."""

    @field_validator("namespaces")
    @classmethod
    def _no_system(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name in SYSTEM_NAMESPACES or re.match(r"kube-", name):
                raise PydanticCustomError(
                    "GW107",
                    "{name} is Kubernetes' own: nothing is ended there",
                    {"name": repr(name)},
                )
        return names

    def allows(self, namespace: str) -> bool:
        """Whether pods of a namespace may be ended."""
        if namespace in SYSTEM_NAMESPACES:
            return False
        return not self.namespaces or namespace in self.namespaces
