"""The parts of a policy file that only one engine needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, StringConstraints
from pydantic_core import PydanticCustomError

from gpuwarden.fields import Bytes, Seconds, Strict, Words, as_tuple

FilePath = Annotated[str, StringConstraints(pattern=r"^/[^\x00-\x1f]{0,4000}[^/\x00-\x1f]$")]
"""Absolute path of a file or folder."""
DnsLabel = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
"""A name as Kubernetes has them: lower-case letters, digits, `-`; at most 63."""
DnsName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$")]
"""The same with dots, at most 253."""
SlurmName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,62}$")]
"""A name that Slurm's commands and files take without quotes."""
_PREFIX = r"([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?/)?"
LabelKey = Annotated[
    str, StringConstraints(pattern=rf"^{_PREFIX}[A-Za-z0-9]([A-Za-z0-9_.-]{{0,61}}[A-Za-z0-9])?$")
]
"""Key of a label of Kubernetes."""
LabelValue = Annotated[
    str, StringConstraints(pattern=r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$")
]
"""Value of a label of Kubernetes."""


def _some(labels: Mapping[str, str]) -> Mapping[str, str]:
    if not labels:
        raise PydanticCustomError("GW111", "must not be empty: it would be every node", {})
    return labels


class AtMost(Strict):
    """How often something may happen."""

    times: Annotated[int, Field(ge=1, le=100)]
    """That often."""
    per: Annotated[Seconds, Field(gt=0)]
    """In any stretch of this length."""


# -- of a kind of cards


class SlurmCard(Strict):
    """How Slurm knows a kind of cards."""

    gres: SlurmName
    """Its type in gres.conf, the `a100` of `gres/gpu:a100`."""
    partition: SlurmName | None = None
    """Where such cards are asked for; the cluster's default partition by default."""
    cpus: Annotated[int, Field(ge=1, le=1024)] | None = None
    """CPUs that a job asks for with each card, for its data loaders; the cluster's default by
    default."""
    host_memory: Bytes | None = None
    """Memory of the node that a job asks for with each card; the cluster's default by default."""


class KueueCard(Strict):
    """How Kubernetes knows a kind of cards."""

    node_labels: Annotated[Mapping[LabelKey, LabelValue], AfterValidator(_some)]
    """Labels of the nodes that have them, such as nvidia.com/gpu.product."""
    resource: LabelKey = "nvidia.com/gpu"
    """What pods ask for; with MIG strategy mixed such as nvidia.com/mig-1g.5gb."""


# -- of a team


class SlurmTeam(Strict):
    """How Slurm knows a team."""

    account: SlurmName
    """Its account; by default it is called as the team is."""


class KueueTeam(Strict):
    """How Kubernetes knows a team."""

    namespace: DnsLabel
    """Where its jobs and its LocalQueue are; by default it is called as the team is."""


# -- of all


_OWN_OPTIONS = frozenset(
    {
        "account", "array", "begin", "chdir", "comment", "cpus-per-task", "dependency", "error",
        "gpus", "gpus-per-node", "gpus-per-socket", "gpus-per-task", "gres", "hold", "job-name",
        "mem", "no-requeue", "nodes", "ntasks", "open-mode", "output", "parsable", "partition",
        "qos", "requeue", "reservation", "signal", "test-only", "time", "time-min", "uid", "wait",
        "wrap",
    }
)  # fmt: skip
"""Of `sbatch`, by which gpuwarden itself says what a task needs, or which would undo it."""


def _sites_own(option: str) -> str:
    name = option.partition("=")[0].removeprefix("--")
    if name in _OWN_OPTIONS:
        raise PydanticCustomError(
            "GW610",
            "gpuwarden writes {name} itself, or cannot work with it: `cards`, `teams` and "
            "`gpuwarden submit` say what is in it",
            {"name": f"--{name}"},
        )
    return option


SbatchOption = Annotated[
    str,
    StringConstraints(pattern=r"^--[a-z][a-z-]{1,40}(=[A-Za-z0-9_.,:;@%+*/&|()\[\]=-]{1,200})?$"),
    AfterValidator(_sites_own),
]


class SlurmTerms(Strict):
    """Of the Slurm cluster."""

    preempt: Literal["qos", "partitions"] = "qos"
    """By what Slurm tells priorities apart: `qos` needs accounting (slurmdbd); `partitions` makes a
    partition for each priority, and does without."""
    account: SlurmName = "gpuwarden"
    """The account below which the teams' are made; what teams borrow is shared through it."""
    programs: FilePath = "/usr/bin"
    """Folder of sacctmgr, scontrol, squeue, sacct, sbatch and scancel."""
    config: FilePath | None = None
    """slurm.conf; Slurm's own default by default."""
    timeout: Annotated[Seconds, Field(gt=0, le=600)] = 30.0
    """For one command."""
    container: Annotated[tuple[Words, ...], BeforeValidator(as_tuple)] = ()
    """The command that runs another one in an image, with `{image}` for it, such as
    [apptainer, exec, --nv, "docker://{image}"]. Without it no job can have an image."""
    sbatch: Annotated[tuple[SbatchOption, ...], BeforeValidator(as_tuple)] = ()
    """What the site wants of every job, and gpuwarden does not write itself, each as `sbatch` takes
    it: [--mem-per-cpu=4G, --constraint=gpu]."""
    requeues: AtMost | None = None
    """A job that comes back without a new epoch waits longer each time, and is held, and told of,
    when it came back more often than this; by default nobody is."""


class KueueVolume(Strict):
    """A volume of every job."""

    claim: DnsLabel
    """The PersistentVolumeClaim in each team's namespace; it must be there."""
    mount: FilePath
    """Where jobs see it."""


class KueueTerms(Strict):
    """Of the Kubernetes cluster."""

    cohort: Annotated[DnsLabel, StringConstraints(max_length=20)] = "gpuwarden"
    """The cohort in which the teams' ClusterQueues lend to one another; the names of all objects
    begin with it, and two policies of one cluster must not share it."""
    own_preemption: Literal["never", "fallback"] = "never"
    """Whether Kueue may end jobs by itself. `never`: only gpuwarden asks them to leave, and nothing
    is ended while it is down. `fallback`: Kueue evicts without a notice where gpuwarden is down,
    and what a notice did not bring; needs Kueue 0.19, and priorities that each preempt all lower
    ones."""
    admission: Literal["deny", "warn", "none"] = "deny"
    """What becomes of Jobs in the teams' queues that name a priority which is not their team's, an
    image outside `images`, or a PriorityClass for their pods. `deny`: the API server refuses them;
    `warn`: it takes them, warns whoever makes them and writes them into its audit log; `none`:
    nobody looks, and none of Kubernetes' admission policies (1.30) are needed. Jobs that are there
    already are left alone."""
    pod_priorities: Annotated[tuple[DnsName, ...], BeforeValidator(as_tuple)] = ()
    """PriorityClasses that pods of queued jobs may name by `priorityClassName`; by default none,
    for with one they may push others' pods from a node without a notice."""
    image: (
        Annotated[
            str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._:/-]{0,400}@sha256:[0-9a-f]{64}$")
        ]
        | None
    ) = None
    """gpuwarden's own image, pinned by digest, for the Deployment of its controller; without it
    none is made, and the controller runs where you start it."""
    engine_url: (
        Annotated[str, StringConstraints(pattern=r"^https?://[^\s/]{1,253}(/[^\s]*)?$")] | None
    ) = None
    """Of the rule engine, through which that Deployment has jobs asked to leave; its token is the
    Secret `<cohort>-engine-token`, key `token`."""
    volume: KueueVolume | None = None
    """Where data and checkpoints are: a job without a volume begins anew after every leave."""
    requeues: AtMost | None = None
    """A job that left with 75 by itself more often than this, each time within five minutes of its
    start, is held, and told of; by default it is only told of."""
    job_files: FilePath | None = "/run/gpuwarden"
    """The exporter's folder on the nodes, which jobs mount so that they can be asked to leave;
    null where pods may mount none of a node's: they then only get the signal that ends them."""
    namespace: DnsLabel = "gpuwarden"
    """Where gpuwarden's own controller runs."""
    kubeconfig: FilePath | None = None
    """In whose name the API server is asked; by default as kubectl has it: KUBECONFIG, the pod's
    own service account, ~/.kube/config."""
    context: Annotated[str, StringConstraints(min_length=1, max_length=253)] | None = None
    """Of the kubeconfig; its current one by default."""
    timeout: Annotated[Seconds, Field(gt=0, le=600)] = 30.0
    """For one request."""


class LocalTerms(Strict):
    """Of the lab box."""

    jobs: FilePath = "/run/gpuwarden"
    """The job files' folder, which the box's exporter and agent use too."""
    barren_restarts: Annotated[int, Field(ge=1, le=100)] = 3
    """A job that came back so often without a new epoch is held."""
    retries: Annotated[int, Field(ge=0, le=100)] = 0
    """How often a job that failed is tried again by itself."""
