"""What `gpuwarden doctor node` looks for. docs/doctor.md is made from this."""

from __future__ import annotations

from gpuwarden.findings import Known

DRIVER = Known(
    "node.driver",
    "the NVIDIA driver answers",
    "Nothing is known of this node's cards, and no job here is judged.",
    "Look at `nvidia-smi` and `dmesg`; after an upgrade of the driver reboot the node.",
    "docs/runbooks/nvml-down.md",
)
CARDS = Known(
    "node.cards",
    "NVML, the kernel and /dev know the same cards",
    "A card has fallen off the bus, or cannot be opened: its jobs fail and are not seen.",
    "Look for Xid in `dmesg`; reset the card, or reboot. In a container: pass every device on.",
    "docs/runbooks/gpu-lost.md",
)
PROCESSES = Known(
    "node.processes",
    "the exporter sees the processes of all users",
    "Jobs of others have no owner, and are UNKNOWN to every rule.",
    "Run it with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH (as the unit does), or as root.",
    "docs/operations.md#what-exporter-and-agent-may-do",
)
HIDEPID = Known(
    "node.hidepid",
    "/proc hides nobody from the exporter",
    "With hidepid, a process without CAP_SYS_PTRACE sees its own user's processes alone.",
    "Give the capability, or mount /proc with gid= of the exporter's group.",
    "docs/operations.md#what-exporter-and-agent-may-do",
)
CGROUPS = Known(
    "node.cgroups",
    "cgroup v2 with cgroup.kill",
    "Without it the agent ends a job process by process; one that forks fast escapes longer.",
    "Boot with systemd.unified_cgroup_hierarchy=1, on Linux 5.14 or later.",
    "docs/operations.md#a-bare-process",
)
KERNEL = Known(
    "node.kernel",
    "the kernel has pidfds and pressure stall information",
    "Without pidfds (Linux 5.3) the agent does not run; without PSI pressure is not measured.",
    "Use a newer kernel; boot with psi=1.",
)
JOBS = Known(
    "node.jobs",
    "the folder of job files is as it should be",
    "Trainings cannot say what they do, or could write each other's files and requests.",
    "systemd-tmpfiles --create; or jobs/ 1777 (exporter's user) and requests/ 0755 (agent's user).",
    "docs/operations.md#what-exporter-and-agent-may-do",
)
KEYS = Known(
    "node.keys",
    "the engine's public key is here, and only root can change it",
    "Without it the agent obeys nobody; whoever can add a key can end every job of this node.",
    "Copy engine.pub of the engine to the folder; chown root, chmod 0644 (folder 0755).",
    "docs/operations.md#secrets",
)
KILL_SWITCH = Known(
    "node.kill_switch",
    "the kill switch is off",
    "The agent signals nothing while the file exists.",
    "If it is not wanted any more: remove the file.",
    "docs/operations.md#stop-everything",
)
RELEASE = Known(
    "node.release",
    "the driver is not released",
    "Nothing is known of the cards meanwhile, and the agent refuses to act.",
    "`gpuwarden exporter acquire` takes the driver back.",
    "docs/operations.md#reset-a-card-change-mig-upgrade-the-driver",
)
EXPORTER = Known(
    "node.exporter",
    "the exporter answers with a current snapshot",
    "The node is dark: nothing is known of its jobs, and none is ended.",
    "systemctl status gpuwarden-exporter; its log says what fails.",
    "docs/runbooks/exporter-down.md",
)
COLLECTORS = Known(
    "node.collectors",
    "every collector succeeds",
    "What it would tell is absent, and rules that need it are UNKNOWN.",
    "The exporter's log names the reason.",
    "docs/runbooks/collector-failing.md",
)
AGENT = Known(
    "node.agent",
    "the agent answers, on this boot, with the keys of its folder",
    "Jobs here can be judged but not ended.",
    "systemctl status gpuwarden-agent; its log says what fails.",
    "docs/runbooks/agent-unreachable.md",
)
AGENT_RIGHTS = Known(
    "node.agent_rights",
    "the agent may signal and see every process",
    "It refuses to end jobs of other users, or cannot prove that they ended.",
    "Run it with the capabilities of deploy/systemd/gpuwarden-agent.service.",
    "docs/operations.md#what-exporter-and-agent-may-do",
)
LISTENING = Known(
    "node.listening",
    "Prometheus and the engine can reach this node",
    "An address of the loopback is reached by nobody on another machine.",
    "--web.listen-address with an address of the network, behind a firewall; see who may read it.",
    "docs/operations.md#who-may-read-a-nodes-metrics",
)
CLOCK = Known(
    "node.clock",
    "the clock is kept, and agrees with engine and Prometheus",
    "Beyond 5 s nothing on this node is judged, and the agent refuses requests as expired.",
    "Run chrony or systemd-timesyncd; see `timedatectl`.",
    "docs/runbooks/clock-skew.md",
)
DISK = Known(
    "node.disk",
    "there is room for journal, state and job files",
    "What the agent cannot write down it does not do; trainings cannot say how they are.",
    "Free some space on the file system that is named.",
    "docs/runbooks/agent-unreachable.md",
)
FILES = Known(
    "node.files",
    "exporter and agent may open enough files",
    "They answer nobody any more once they run out of descriptors.",
    "Raise LimitNOFILE of the unit; see who opens so many connections.",
)
SLURM = Known(
    "node.slurm",
    "Slurm answers about this node's jobs",
    "Which job a process belongs to is UNKNOWN, and Slurm's jobs are not judged.",
    "Can this node's `scontrol show job` reach slurmctld?",
    "docs/operations.md#jobs-of-slurm-and-kubernetes",
)
KUBELET = Known(
    "node.kubelet",
    "the kubelet tells which pod has which card",
    "Cards of pods without a process are taken for free.",
    "Mount /var/lib/kubelet/pod-resources into the exporter; it needs gpuwarden[kubelet].",
    "docs/kubernetes.md",
)

KNOWN: tuple[Known, ...] = (
    *(DRIVER, CARDS, PROCESSES, HIDEPID, CGROUPS, KERNEL, JOBS, KEYS, KILL_SWITCH, RELEASE),
    *(EXPORTER, COLLECTORS, AGENT, AGENT_RIGHTS, LISTENING, CLOCK, DISK, FILES, SLURM, KUBELET),
)
"""Every check of a node, in the order in which they are told."""
