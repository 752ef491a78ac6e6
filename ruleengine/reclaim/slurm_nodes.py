"""Whether a job's nodes by Prometheus and by Slurm are the same machines."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from typing import TYPE_CHECKING, Final

from gpuwarden.errors import RefusedAction
from gpuwarden.platforms.slurm_nodes import decode_nodes
from gpuwarden.ruleengine.reclaim.node import host_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gpuwarden.ruleengine.verdicts import JobFacts
    from gpuwarden.slurm_commands import SlurmCommands

_RESOLVE_SECONDS: Final = 5.0


async def disagreement(commands: SlurmCommands, job: JobFacts, nodes: Sequence[str]) -> str:
    """Why the nodes of a job's facts are not all among those of Slurm, or empty.

    Raises:
        ServiceUnavailable: Slurm does not say what its nodes are.
    """
    try:
        hosts = {host_of(instance) for instance in job.instances or (job.instance,)}
    except RefusedAction as error:
        return str(error)
    left = {host for host in hosts if _short(host) not in set(map(_short, nodes))}
    if not left:
        return ""
    text = await commands.output(
        "scontrol", "show", "node", "--all", "--details", "--oneliner", ",".join(nodes)
    )
    names = {word for node in decode_nodes(text) for word in (node.name, *node.hosts)}
    left = {host for host in left if _short(host) not in set(map(_short, names))}
    if left:
        known = {address for name in names for address in await _addresses(name)}
        left = {host for host in left if not known & await _addresses(host)}
    if not left:
        return ""
    return f"{', '.join(sorted(left))} is none of the job's nodes by Slurm ({', '.join(nodes)})"


def _short(host: str) -> str:
    """A host without its domain; an address as it is."""
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return host.partition(".")[0].lower()
    return host.strip("[]")


async def _addresses(host: str) -> frozenset[str]:
    """What a name resolves to; nothing where it does not, or not in time."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_RESOLVE_SECONDS):
            found = await loop.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, TimeoutError):
        return frozenset()
    return frozenset(str(item[4][0]) for item in found)
