"""A Slurm of one node for whoever outgrows the local engine: its files, and what starts it. Pure.

What only the machine knows (its name, cores, memory, its Slurm's version, whether systemd runs) the
script writes into `machine.conf` there, so that the files are the same for the same policy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from gpuwarden.scheduling.engines import By, EngineObject, Remark, Rendering
from gpuwarden.scheduling.policies import policy_hash
from gpuwarden.scheduling.slurm.configs import preempting
from gpuwarden.scheduling.slurm.names import by_qos, gres_of
from gpuwarden.scheduling.slurm.renderings import (
    CONFIG,
    FRAGMENT,
    check_partitions,
    check_people,
    fragment,
    partitions_of,
)
from gpuwarden.scheduling.slurm.versions import NEWEST, OLDEST, notice_setting, version_of, written

if TYPE_CHECKING:
    from gpuwarden.scheduling.policies import Policy
    from gpuwarden.scheduling.slurm.versions import Version

_CLUSTER = "gpuwarden"
_PACKAGES = "slurmctld slurmd slurm-client munge"
_DATABASE_PACKAGES = "slurmdbd mariadb-server"
_CREDENTIAL_SECONDS = 30
"""A job that left may start again after so long; Slurm's own default is 120."""


def render_init(policy: Policy, *, version: str | None) -> Rendering:
    """Everything for a Slurm of one node.

    Args:
        policy: whose cards are all on that node.
        version: of the Slurm that is installed there; None is the newest that is known.

    Raises:
        InvalidInput: Slurm cannot do it in the way that `slurm.preempt` wants; or the version.
    """
    known = version_of(version)
    check_partitions(policy)
    check_people(policy)
    files = {
        "slurm.conf": _slurm_conf(policy),
        FRAGMENT: _fragment(policy, known),
        "gres.conf": _gres_conf(policy),
        "cgroup.conf": "ConstrainDevices=yes\nConstrainCores=yes\n",
    }
    if by_qos(policy):
        files["slurmdbd.conf"] = _SLURMDBD_CONF
    files["start.sh"] = _start(policy, tuple(files))
    return Rendering(
        engine="slurm",
        version=written(known),
        policy=policy_hash(policy),
        objects=tuple(
            EngineObject(CONFIG, name, {"text": text}, text, By.HAND, _NOTES.get(name, ""))
            for name, text in files.items()
        ),
        remarks=(
            Remark(
                "cards",
                "gres.conf takes the cards in the order of /dev/nvidia0, 1, ...: compare it with "
                "`nvidia-smi -L` where there are several kinds",
            ),
        ),
    )


_NOTES: Final = {
    "start.sh": "run it as root in this folder: it installs the files to /etc/slurm and starts "
    "the daemons",
}

_SLURMDBD_CONF = """\
AuthType=auth/munge
DbdHost=localhost
SlurmUser=slurm
LogFile=/var/log/slurm/slurmdbd.log
PidFile=/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=localhost
# By the socket and the name of its user: there is no password to keep.
StorageUser=slurm
StorageLoc=slurm_acct_db
"""


def _slurm_conf(policy: Policy) -> str:
    lines = [
        f"# A Slurm of one node for {len(policy.teams)} teams; made by gpuwarden policy render.",
        f"ClusterName={_CLUSTER}",
        "SlurmUser=slurm",
        "AuthType=auth/munge",
        f"AuthInfo=cred_expire={_CREDENTIAL_SECONDS}",
        "StateSaveLocation=/var/lib/slurm/slurmctld",
        "SlurmdSpoolDir=/var/lib/slurm/slurmd",
        "SlurmctldPidFile=/run/slurmctld.pid",
        "SlurmdPidFile=/run/slurmd.pid",
        "SlurmctldLogFile=/var/log/slurm/slurmctld.log",
        "SlurmdLogFile=/var/log/slurm/slurmd.log",
        "MpiDefault=none",
        "ReturnToService=2",
        "SchedulerType=sched/backfill",
        # Of equals, who has run the shortest leaves: the least work is lost.
        "SchedulerParameters=preempt_youngest_first",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "GresTypes=gpu",
        *([] if by_qos(policy) else ["AccountingStorageType=accounting_storage/none"]),
        *(["AccountingStorageHost=localhost"] if by_qos(policy) else []),
        "include /etc/slurm/machine.conf",
        f"include /etc/slurm/{FRAGMENT}",
    ]
    if not partitions_of(policy):
        names = sorted(
            {each.slurm.partition for each in policy.cards if each.slurm and each.slurm.partition}
        ) or ["gpu"]
        lines += [
            f"PartitionName={name} Nodes=ALL{' Default=YES' if not number else ''} "
            "MaxTime=INFINITE State=UP"
            for number, name in enumerate(names)
        ]
    return "\n".join([*lines, ""])


def _fragment(policy: Policy, version: Version) -> str:
    """What every version knows; the key that was renamed is in `machine.conf`."""
    renamed = "=".join(notice_setting(version))
    lines = fragment(policy, version).splitlines()
    if renamed in lines:
        at = lines.index(renamed)
        del lines[at - 1 : at + 1]  # with its reason
    return "\n".join([*lines, ""])


def _notice_lines(policy: Policy) -> str:
    if not preempting(policy):
        return ""
    old, new = ("=".join(notice_setting(version)) for version in (OLDEST, NEWEST))
    return f'  case $(slurmctld -V) in *" 22.05"*) echo {old} ;; *) echo {new} ;; esac\n'


def _gres_conf(policy: Policy) -> str:
    lines, first = [], 0
    for card in policy.cards:
        gres = gres_of(policy, card.name)
        kind = "" if gres is None else f" Type={gres}"
        last = first + card.count - 1
        files = f"[{first}-{last}]" if last > first else str(first)
        lines.append(f"Name=gpu{kind} File=/dev/nvidia{files}")
        first = last + 1
    return "\n".join([*lines, ""])


def _count(policy: Policy) -> int:
    return sum(card.count for card in policy.cards)


def _gres_of_node(policy: Policy) -> str:
    counts: dict[str, int] = {}
    for card in policy.cards:
        gres = gres_of(policy, card.name)
        name = "gpu" if gres is None else f"gpu:{gres}"
        counts[name] = counts.get(name, 0) + card.count
    return ",".join(f"{name}:{count}" for name, count in counts.items())


def _start(policy: Policy, files: tuple[str, ...]) -> str:
    accounting = by_qos(policy)
    packages = f"{_PACKAGES} {_DATABASE_PACKAGES}" if accounting else _PACKAGES
    return _START.format(
        packages=packages,
        programs="slurmctld slurmd scontrol munged" + (" slurmdbd mariadb" if accounting else ""),
        files=" ".join(files),
        gres=_gres_of_node(policy),
        cards=" ".join(f"/dev/nvidia{index}" for index in range(_count(policy))),
        notice=_notice_lines(policy),
        before=_DATABASE_START.format(cluster=_CLUSTER) if accounting else "",
    )


_START = """\
#!/bin/sh
# Installs the files beside it to /etc/slurm and starts a Slurm of one node. Run it as root; again
# after a change, and after each boot where there is no systemd. It needs:
#   apt-get install {packages}
set -eu
cd "$(dirname "$0")"
say() {{ echo "start.sh: $*" >&2; }}
for program in {programs}; do
  command -v "$program" >/dev/null && continue
  say "$program is missing: apt-get install {packages}"
  exit 3
done
if [ -s /etc/slurm/slurm.conf ] && ! grep -q 'made by gpuwarden' /etc/slurm/slurm.conf; then
  say "/etc/slurm/slurm.conf is of another Slurm: use \\`gpuwarden policy apply\\` there"
  exit 1
fi
for card in {cards}; do
  [ -e "$card" ] && continue
  say "$card is not there: is the driver loaded, and are the policy's cards those of this node?"
  exit 3
done
until_works() {{ # SECONDS COMMAND...
  tries=$(($1 * 5)); shift
  while ! "$@" >/dev/null 2>&1; do
    tries=$((tries - 1))
    [ "$tries" -gt 0 ] || {{ say "gave up waiting for: $*; see /var/log/slurm"; exit 3; }}
    sleep 0.2
  done
}}
systemd() {{ [ -d /run/systemd/system ]; }}
start() {{ # UNIT DAEMON COMMAND...: by systemd where it runs, else in the background
  unit=$1; daemon=$2; shift 2
  if systemd; then systemctl enable --quiet "$unit"; systemctl restart "$unit"
  elif ! pgrep -x "$daemon" >/dev/null; then setsid "$@" </dev/null >/dev/null 2>&1 &
  fi
}}

# -- files
host=$(hostname -s)
install -d -m 755 /etc/slurm /var/lib/slurm
install -d -m 755 -o slurm -g slurm /var/lib/slurm/slurmctld /var/log/slurm
install -d -m 755 /var/lib/slurm/slurmd
for file in {files}; do install -m 644 "$file" "/etc/slurm/$file"; done
{{
  echo "SlurmctldHost=$host(127.0.0.1)"
  if systemd; then echo ProctrackType=proctrack/cgroup; echo TaskPlugin=task/cgroup,task/affinity
  else echo ProctrackType=proctrack/linuxproc; echo TaskPlugin=task/none; fi
{notice}\
  # The cores and the memory that slurmd itself sees.
  echo "NodeName=$host NodeAddr=127.0.0.1 $(slurmd -C | sed -n 's/^NodeName=[^ ]* //p')" \\
    "Gres={gres} State=UNKNOWN"
}} > /etc/slurm/machine.conf
if ! systemd && slurmd -V | grep -Eq ' (23\\.11|2[4-9]\\.|[3-9][0-9]\\.)'; then
  echo CgroupPlugin=disabled > /etc/slurm/cgroup.conf
fi

# -- daemons
if [ ! -s /etc/munge/munge.key ]; then
  (umask 077; dd if=/dev/urandom of=/etc/munge/munge.key bs=128 count=1 status=none)
  chown munge: /etc/munge/munge.key
fi
systemd || install -d -m 755 -o munge -g munge /run/munge
start munge munged runuser -u munge -- munged --foreground
until_works 20 munge -n
{before}\
start slurmctld slurmctld slurmctld -D
until_works 60 sh -c 'scontrol ping | grep -q UP'
start slurmd slurmd slurmd -D
until_works 60 sh -c 'sinfo -h -o %T | grep -Eq "idle|mixed|allocated"'
sinfo
say "ready; next: gpuwarden policy apply --engine slurm policy.yaml"
"""

_DATABASE_START = """\
chown slurm: /etc/slurm/slurmdbd.conf
chmod 600 /etc/slurm/slurmdbd.conf
if ! systemd; then
  install -d -m 755 -o mysql -g mysql /run/mysqld
  [ -d /var/lib/mysql/mysql ] || mariadb-install-db --user=mysql >/dev/null
fi
start mariadb mariadbd mariadbd --user=mysql --skip-networking
until_works 60 mariadb-admin ping
mariadb -e "create database if not exists slurm_acct_db;
  create user if not exists slurm@localhost identified via unix_socket;
  grant all on slurm_acct_db.* to slurm@localhost"
start slurmdbd slurmdbd runuser -u slurm -- slurmdbd -D
until_works 60 sacctmgr -n show qos
sacctmgr -i add cluster {cluster} >/dev/null || true
"""
