"""What a node's kubelet tells of its pods: names of log folders, and the pod-resources API.

The API (`v1.PodResourcesLister/List`) answers in protocol buffers; the few fields that matter here
are read straight from the wire form, which has not changed since v1 and ignores what is new. See
https://kubernetes.io/docs/concepts/extend-kubernetes/compute-storage-net/device-plugins/
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from gpuwarden.errors import ServiceUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

LIST_METHOD: Final = "/v1.PodResourcesLister/List"
MAX_PODS = 10_000
MAX_DEVICES = 100_000

_FOLDER = re.compile(
    r"(?P<namespace>[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?)_(?P<name>[a-z0-9][a-z0-9.-]{0,252})"
    r"_(?P<uid>[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32})"
)


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod's name.

    Attributes:
        namespace: its namespace.
        name: its name, which another pod may bear after it.
    """

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class PodDevices:
    """Devices that a pod's container was given.

    Attributes:
        pod: the pod.
        container: the container's name in it.
        resource: such as nvidia.com/gpu; for a claim (DRA) the driver's name.
        ids: of the devices, as their plugin calls them.
    """

    pod: Pod
    container: str
    resource: str
    ids: tuple[str, ...]


def decode_log_folder(name: str) -> tuple[str, Pod] | None:
    """(uid, pod) of a folder of /var/log/pods, `<namespace>_<name>_<uid>`; None for another."""
    match = _FOLDER.fullmatch(name)
    return None if match is None else (match["uid"], Pod(match["namespace"], match["name"]))


def decode_list(content: bytes) -> tuple[PodDevices, ...]:
    """The answer of `List`.

    Raises:
        ServiceUnavailable: it is no such answer.
    """
    try:
        return tuple(_list(content))
    except ValueError as error:
        raise ServiceUnavailable(f"the kubelet's answer is not understood: {error}") from error


def _list(content: bytes) -> list[PodDevices]:
    found: list[PodDevices] = []
    for number, pod in enumerate(_messages(content, 1)):
        found += _pod(pod)
        if number >= MAX_PODS or len(found) > MAX_DEVICES:
            raise ValueError("it names more pods or devices than a node has")
    return found


def _pod(content: bytes) -> Iterator[PodDevices]:
    pod = Pod(namespace=_string(content, 2), name=_string(content, 1))
    for container in _messages(content, 3):
        name = _string(container, 1)
        for devices in _messages(container, 2):
            ids = tuple(item.decode() for item in _messages(devices, 2))
            yield PodDevices(pod, name, _string(devices, 1), ids)
        for claim in _messages(container, 5):
            for resource in _messages(claim, 4):
                ids = (_string(resource, 4),)
                yield PodDevices(pod, name, _string(resource, 2), ids)


def _string(content: bytes, field: int) -> str:
    """The last value of a text field, as the format has it; empty where it is not set."""
    value = b""
    for item in _messages(content, field):
        value = item
    return value.decode()


def _messages(content: bytes, field: int) -> Iterator[bytes]:
    """Values of a field that has a length: texts and messages."""
    at = 0
    while at < len(content):
        key, at = _varint(content, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            _, at = _varint(content, at)
            continue
        if kind in (1, 5):
            size = 8 if kind == 1 else 4
        elif kind == 2:
            size, at = _varint(content, at)
        else:
            raise ValueError(f"wire type {kind}")
        if at + size > len(content):
            raise ValueError("it ends early")
        if kind == 2 and number == field:
            yield content[at : at + size]
        at += size


def _varint(content: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(content):
            raise ValueError("it ends early")
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return value, at
    raise ValueError("a number of more than 64 bits")
