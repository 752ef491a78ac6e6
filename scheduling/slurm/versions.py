"""What differs between versions of Slurm: an unknown key ends every command of one."""

from __future__ import annotations

from typing import Final

from gpuwarden.errors import InvalidInput
from gpuwarden.platforms.slurm_texts import decode_version

Version = tuple[int, int]
"""Such as (22, 5)."""

OLDEST: Final[Version] = (22, 5)
NEWEST: Final[Version] = (24, 11)
"""The oldest and the newest with which gpuwarden's tests were run; newer ones are taken for it."""
_RENAMED_NOTICE: Final[Version] = (23, 2)
_WANTS_CGROUPS: Final[Version] = (23, 11)


def version_of(text: str | None) -> Version:
    """A version by its words.

    Args:
        text: such as `22.05`, or what `scontrol --version` prints; None for the newest known.

    Raises:
        InvalidInput: it is none, or too old.
    """
    if text is None:
        return NEWEST
    found = decode_version(text)
    if found < OLDEST:
        what = "is no version of Slurm" if found == (0, 0) else "of Slurm is too old"
        raise InvalidInput(f"{text.strip()!r} {what}: gpuwarden needs {written(OLDEST)} or later")
    return found


def written(version: Version) -> str:
    """A version as Slurm writes it, such as 22.05."""
    return f"{version[0]}.{version[1]:02}"


def notice_setting(version: Version) -> tuple[str, str]:
    """The key of slurm.conf, and its word, by which a job's own `--signal` is its notice."""
    if version >= _RENAMED_NOTICE:
        return "PreemptParameters", "send_user_signal"
    return "SlurmctldParameters", "preempt_send_user_signal"


def needs_cgroup_word(version: Version) -> bool:
    """Whether a machine without cgroups must say so in cgroup.conf; older ones do not know how."""
    return version >= _WANTS_CGROUPS
