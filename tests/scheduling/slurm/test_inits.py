"""A Slurm of one node from a policy: its files, and the script that starts it for real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.scheduling.policy_files import a_policy

from gpuwarden.scheduling.engines import By
from gpuwarden.scheduling.slurm.inits import render_init
from gpuwarden.scheduling.slurm.versions import version_of

REPOSITORY = Path(__file__).resolve().parents[3]
POLICY = """\
version: 1
timezone: Europe/Berlin
engine: slurm
cards:
- {name: a100-40, model: A100, memory: 40GiB, count: 2, slurm: {gres: a100}}
teams:
- {name: vision, users: [root], quota: {a100-40: 2}}
priorities:
- {name: low, value: 10, default: true}
- {name: high, value: 1000, preempts: [low]}
preemption:
  {minimum_run: 0s, notice: epoch, deadline: 20m, back_off: 0s, at_most: {times: 3, per: 24h}}
"""
MACHINE = """\
set -e
# Places of its own for all that the script writes to, a network of its own for fixed ports.
mount --make-rprivate /
for place in /etc/slurm /etc/munge /run /var/lib/slurm /var/log/slurm /var/lib/mysql \\
  /var/lib/munge /var/log/munge; do mkdir -p "$place"; mount -t tmpfs tmpfs "$place"; done
for place in /etc/munge /var/lib/munge /var/log/munge; do chown munge: "$place"; chmod 700 "$place"
done
mkdir "$1/dev"
mount -t tmpfs tmpfs "$1/dev"
cp -a /dev/null /dev/zero /dev/random /dev/urandom /dev/tty /dev/fd /dev/stdin /dev/stdout \\
  /dev/stderr "$1/dev"
mkdir "$1/dev/shm"
ln -s null "$1/dev/nvidia0"
ln -s null "$1/dev/nvidia1"
mount --move "$1/dev" /dev
"$2" "$3"  # the network
cd "$1/files"
sh start.sh
sh start.sh  # again: it does no harm
"""
NETWORK = """\
import fcntl, socket, struct

# A resolver that knows no address but the loopback's finds none for a server to listen on.
address = struct.pack("2s4s8s", bytes(2), socket.inet_aton("10.99.0.1"), bytes(8))
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
    fcntl.ioctl(probe, 0x8914, struct.pack("16sh", b"lo", 0x41))
    fcntl.ioctl(probe, 0x8916, struct.pack("16sH", b"lo:0", socket.AF_INET) + address)
    fcntl.ioctl(probe, 0x8914, struct.pack("16sh", b"lo:0", 0x41))
"""


def test_the_files_are_the_same_for_every_version() -> None:
    """What differs the script finds out: a key that a version does not know ends it."""
    policy = a_policy()
    old, new = render_init(policy, version="22.05"), render_init(policy, version="24.11")
    texts = [
        {each.name: each.text for each in rendering.objects if each.name != "gpuwarden.conf"}
        for rendering in (old, new)
    ]
    assert texts[0] == texts[1]
    assert {each.by for each in new.objects} == {By.HAND}
    fragments = [each.text for each in (*old.objects, *new.objects) if "conf" in each.name]
    assert not any("send_user_signal" in text for text in fragments)
    assert version_of(None) == (24, 11)


def test_cards_follow_one_another() -> None:
    """The kinds of a policy are the device files in their order, and the node has all of them."""
    files = {each.name: each.text for each in render_init(a_policy(), version=None).objects}
    assert files["gres.conf"] == (
        "Name=gpu Type=a100 File=/dev/nvidia[0-31]\nName=gpu Type=h100 File=/dev/nvidia[32-39]\n"
    )
    assert "Gres=gpu:a100:32,gpu:h100:8" in files["start.sh"]


@pytest.mark.parametrize("preempt", ["qos", "partitions"])
def test_the_script_is_one_that_a_shell_reads(tmp_path: Path, preempt: str) -> None:
    """Without a database where partitions do it."""
    priorities = [{"name": "low", "value": 1}, {"name": "high", "value": 2, "preempts": ["low"]}]
    policy = a_policy(priorities=priorities, slurm={"preempt": preempt})
    files = {each.name: each.text for each in render_init(policy, version=None).objects}
    script = tmp_path / "start.sh"
    script.write_text(files["start.sh"])
    assert subprocess.run(["/bin/sh", "-n", script], check=False, timeout=30).returncode == 0
    assert ("slurmdbd" in files["start.sh"]) == (preempt == "qos")
    assert ("slurmdbd.conf" in files) == (preempt == "qos")


@pytest.mark.sweep
@pytest.mark.timeout(300)
@pytest.mark.skipif(os.geteuid() != 0, reason="only root may start daemons and mount")
@pytest.mark.parametrize("preempt", ["qos", "partitions"])
def test_a_slurm_starts_from_a_policy_and_runs_its_jobs(tmp_path: Path, preempt: str) -> None:
    """As a person would: render, start, apply; then a job gets its card."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(POLICY + f"slurm: {{preempt: {preempt}}}\n")
    tmp_path.chmod(0o755)
    gpuwarden = f"{sys.executable} -m gpuwarden policy"
    options = f"--engine slurm {policy}"
    applied = f"{gpuwarden} apply --yes --record {tmp_path / 'record'} {options}"
    job = "--gres=gpu:a100:1 -t 1" + (" -A vision --qos=high" if preempt == "qos" else " -p high")
    (tmp_path / "network.py").write_text(NETWORK)
    (tmp_path / "machine.sh").write_text(
        MACHINE
        + (f"cd {REPOSITORY}\n{applied}\n{applied}\n" if preempt == "qos" else "")
        + f"srun {job} sh -c 'echo got card $CUDA_VISIBLE_DEVICES'\n"
    )
    rendered = subprocess.run(
        f"{gpuwarden} render --init --out {tmp_path / 'files'} {options}".split(),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert rendered.returncode == 0, rendered.stderr
    done = subprocess.run(
        [
            *[
                "unshare",
                "--mount",
                "--net",
                "--pid",
                "--fork",
                "--kill-child",
                "--mount-proc",
                "bash",
            ],
            tmp_path / "machine.sh",
            tmp_path,
            sys.executable,
            tmp_path / "network.py",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "got card 0" in done.stdout
