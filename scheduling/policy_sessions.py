"""What `gpuwarden policy` needs to talk to an engine: policy, adapter, and shared options."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpuwarden.clock import SystemClock
from gpuwarden.consoles import printable
from gpuwarden.scheduling.engines import adapter_of
from gpuwarden.scheduling.policy_checks import check_policy

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from gpuwarden.scheduling.engines import Adapter, Rendering
    from gpuwarden.scheduling.policies import Engine, Policy

    AdapterOf = Callable[[Engine, Policy], Adapter]

_STATE = Path("/var/lib/gpuwarden")
yes_option: Callable[[Callable[..., None]], Callable[..., None]] = click.option(
    "--yes", "-y", is_flag=True, help="Do not ask."
)
record_option: Callable[[Callable[..., None]], Callable[..., None]] = click.option(
    "--record",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where what was applied is kept.  [default: /var/lib/gpuwarden/policy-ENGINE.json]",
)


def record_path(chosen: Path | None, engine: Engine) -> Path:
    """Where the record of an engine is, if no other file was chosen."""
    return chosen or _STATE / f"policy-{engine}.json"


def _load(file: Path, engine: Engine | None) -> tuple[Policy, Engine]:
    checked = check_policy(file, now=SystemClock().wall(), engine=engine)
    found = checked.usable()
    if checked.diagnostics:
        click.echo(printable(checked.render()), err=True)
    return found, engine or found.engine


def say(lines: str) -> None:
    """Print what others may have written parts of."""
    click.echo(printable(lines))


class Session:
    """One policy and one engine.

    Args:
        adapter: of the engine.
        found: the policy.
        engine: whose objects are meant.
    """

    def __init__(self, adapter: Adapter, found: Policy, engine: Engine) -> None:
        self.adapter = adapter
        self.policy = found
        self.engine = engine

    async def wanted(self) -> Rendering:
        """The policy as objects for the version that is found."""
        return self.adapter.render(self.policy, version=await self.adapter.version())


@asynccontextmanager
async def open_session(
    factory: AdapterOf | None, file: Path, engine: Engine | None
) -> AsyncIterator[Session]:
    """A policy that can be used, and its engine's adapter as long as it is needed.

    Args:
        factory: makes adapters; that of real engines by default.
        file: of the policy; its warnings are printed.
        engine: for which; the one that the file names by default.

    Raises:
        InvalidInput: the policy cannot be used.
    """
    found, chosen = _load(file, engine)
    adapter = (factory or adapter_of)(chosen, found)
    try:
        yield Session(adapter, found, chosen)
    finally:
        await adapter.aclose()
