"""A real Slurm with accounting: MariaDB and slurmdbd beside the box of `tests.slurm_servers`.

Nothing here depends on pytest. The start takes some six seconds, so a test module starts it once::

    @pytest.fixture(scope="module")
    def cluster():
        with (
            tempfile.TemporaryDirectory(prefix="gw") as name,  # others may enter it, as munge wants
            accounted_slurm(Path(name), preemption="qos", grace=20) as cluster,
        ):
            yield cluster

    manage(cluster, "add", "qos", "high", "set", "priority=1000")
    cluster.submit("sleep 60", "--account=vision", "--qos=high", "--gres=gpu:1")

The database listens on a socket in the box's folder alone; slurmdbd on a free port of the loopback.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import subprocess
from typing import TYPE_CHECKING, Literal

from tests.servers import ServerFailed, binary, free_port, until
from tests.slurm_servers import CLUSTER, SlurmCluster, slurm, slurm_version

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

Preemption = Literal["qos", "tiers"] | None

_DATABASE = "slurm_acct_db"
_SECONDS = 60.0
_NEEDED = "apt-get install slurmdbd mariadb-server"


@contextlib.contextmanager
def accounted_slurm(
    folder: Path,
    *,
    preemption: Preemption = None,
    grace: int = 20,
    gpus: int = 4,
    teams: Mapping[str, Sequence[str]] | None = None,
    settings: Sequence[str] = (),
    others: Sequence[str] = (),
    enforce: str = "associations,limits,qos,safe",
) -> Iterator[SlurmCluster]:
    """A Slurm whose jobs are counted, limited by accounts and, if wished, preempted.

    Args:
        folder: where everything goes; a short path, for it holds sockets.
        preemption: `qos` between qualities of service that the test makes; `tiers` between the
            partitions `low` (the default one) and `high`; None for none.
        grace: GraceTime of the partition `low`, in seconds; a QOS has its own.
        gpus: cards of each node.
        teams: accounts -> their users; `vision` and `speech` with the user who runs the test where
            it is not given. The first is that user's default.
        settings: as for `slurm`.
        others: names of further nodes.
        enforce: AccountingStorageEnforce.

    Raises:
        ServerFailed: something does not start.
    """
    user = pwd.getpwuid(os.geteuid()).pw_name
    accounts = {"vision": (user,), "speech": (user,)} if teams is None else teams
    (folder / "db").mkdir(parents=True, exist_ok=True)
    port = free_port()
    lines = [
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=127.0.0.1",
        f"AccountingStoragePort={port}",
        # Without it the commands look for the machine's own munge, and hang.
        f"AccountingStoragePass={folder / 'munge/sock'}",
        "AccountingStorageTRES=gres/gpu,gres/gpu:a100",
        f"AccountingStorageEnforce={enforce}",
        "PriorityType=priority/multifactor",
        "PriorityWeightQOS=100000",
        "PriorityWeightPartition=1000",
        "PriorityCalcPeriod=1",
        "PriorityDecayHalfLife=0",
        "PriorityUsageResetPeriod=MONTHLY",
        *_preemption_lines(preemption, grace, slurm_version()),
        *settings,
    ]

    def prepare(cluster: SlurmCluster) -> None:
        (cluster.folder / "db").chmod(0o755)
        _database(cluster)
        _slurmdbd(cluster, port, user)
        _accounts(cluster, accounts, user)

    with slurm(folder, gpus=gpus, settings=lines, others=others, before=prepare) as cluster:
        yield cluster


def manage(cluster: SlurmCluster, *words: str) -> str:
    """What `sacctmgr` says to a change, which it makes without asking back.

    Raises:
        ServerFailed: it refuses; "nothing to do" is a refusal too.
    """
    return cluster.run("sacctmgr", "--immediate", *words)


def _preemption_lines(kind: Preemption, grace: int, version: tuple[int, int]) -> list[str]:
    if kind is None:
        return []
    # A key that a version does not know ends each of its commands.
    tells = (
        "PreemptParameters=send_user_signal"
        if version >= (23, 2)
        else "SlurmctldParameters=preempt_send_user_signal"
    )
    if kind == "qos":
        return ["PreemptType=preempt/qos", "PreemptMode=REQUEUE", tells]
    return [
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        tells,
        (
            "PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 "
            f"PreemptMode=REQUEUE GraceTime={grace}"
        ),
        "PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF",
    ]


def _database(cluster: SlurmCluster) -> None:
    """A database of its own, which the machine's configuration does not reach."""
    folder = cluster.folder / "db"
    user = pwd.getpwuid(os.geteuid()).pw_name
    socket = f"--socket={folder / 'sock'}"
    try:
        install, client = binary(("mariadb-install-db",)), binary(("mariadb",))
    except ServerFailed as error:
        raise ServerFailed(f"MariaDB is not installed: {_NEEDED}") from error
    made = subprocess.run(
        [
            install,
            "--no-defaults",
            f"--user={user}",
            f"--datadir={folder / 'data'}",
            "--innodb-log-file-size=8M",
            "--auth-root-authentication-method=socket",
            f"--auth-root-socket-user={user}",
            "--skip-test-db",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=_SECONDS,
    )
    if made.returncode:
        raise ServerFailed(f"{install}: {made.stderr or made.stdout}")
    cluster.spawn_on_host(
        "mariadbd",
        binary(("mariadbd",)),
        "--no-defaults",
        f"--user={user}",
        f"--datadir={folder / 'data'}",
        socket,
        f"--pid-file={folder / 'pid'}",
        "--skip-networking",
        "--innodb-buffer-pool-size=64M",
        "--innodb-log-file-size=8M",
        "--innodb-lock-wait-timeout=900",
        "--innodb-flush-log-at-trx-commit=0",
    )
    sql = (
        f"create database {_DATABASE}; create user slurm@localhost identified by 'slurm'; "
        f"grant all on {_DATABASE}.* to slurm@localhost"
    )

    def served() -> bool:
        asked = subprocess.run(
            [client, "--no-defaults", socket, f"--user={user}", "--execute", sql],
            capture_output=True,
            check=False,
            timeout=_SECONDS,
        )
        return asked.returncode == 0

    cluster.wait_until_served("mariadbd", served)


def _slurmdbd(cluster: SlurmCluster, port: int, user: str) -> None:
    munge = cluster.folder / "munge/sock"
    config = cluster.folder / "etc/slurmdbd.conf"
    config.touch(0o600)  # slurmdbd refuses one that others may read
    lines = (
        "AuthType=auth/munge",
        f"AuthInfo=socket={munge}",
        "DbdHost=localhost",
        "DbdAddr=127.0.0.1",
        f"DbdPort={port}",
        f"SlurmUser={user}",
        f"PidFile={cluster.folder / 'slurmdbd.pid'}",
        "StorageType=accounting_storage/mysql",
        "StorageHost=localhost",
        "StorageUser=slurm",
        "StoragePass=slurm",
        f"StorageLoc={_DATABASE}",
    )
    config.write_text("\n".join([*lines, ""]))
    # The client library goes to the machine's own socket for "localhost" unless told otherwise.
    cluster.environment["MYSQL_UNIX_PORT"] = str(cluster.folder / "db/sock")
    cluster.start("slurmdbd")


def _accounts(cluster: SlurmCluster, teams: Mapping[str, Sequence[str]], user: str) -> None:
    """The cluster and its accounts, in one load: seconds faster than one command for each."""
    lines = [
        f"Cluster - '{CLUSTER}':DefaultQOS='normal':QOS='normal'",
        "Parent - 'root'",
        "User - 'root':DefaultAccount='root':AdminLevel='Administrator':Fairshare=1",
        *(f"Account - '{team}':Description='{team}':Organization='lab'" for team in teams),
    ]
    for number, (team, users) in enumerate(teams.items()):
        default = f":DefaultAccount='{team}'" if not number and user != "root" else ""
        lines.append(f"Parent - '{team}'")
        lines += [f"User - '{name}'{default}:Fairshare=1" for name in users]
    path = cluster.folder / "etc/accounts.cfg"
    path.write_text("\n".join([*lines, ""]))
    cluster.run("sacctmgr", "--immediate", "load", str(path))
    until(lambda: CLUSTER in cluster.run("sacctmgr", "--noheader", "show", "cluster"), _SECONDS)
