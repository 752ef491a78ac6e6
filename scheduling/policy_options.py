"""What commands about policies have in common: the file, and the engine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

if TYPE_CHECKING:
    from collections.abc import Callable

DEFAULT_POLICY: Final = Path("/etc/gpuwarden/policy.yaml")
"""Where commands look for the policy if neither they nor GPUWARDEN_POLICY name one."""

policy_argument: Callable[[Callable[..., None]], Callable[..., None]] = click.argument(
    "file",
    type=click.Path(path_type=Path, dir_okay=False),
    default=DEFAULT_POLICY,
    envvar="GPUWARDEN_POLICY",
    metavar="[FILE]",
)
"""The policy file as an argument."""
engine_option: Callable[[Callable[..., None]], Callable[..., None]] = click.option(
    "--engine",
    type=click.Choice(["slurm", "kueue", "local"]),
    help="For this engine and not the one that the file names.",
)
"""Which engine; None is that of the file."""
