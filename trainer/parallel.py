"""What ultralytics' trainer needs in order to be one rank of several, on cards or on the CPU.

Ultralytics trains in parallel on cards only and makes the process group itself. Here the ranks have
met before (`agreement.join`), each may see no card but its own, and the CPU is allowed.
"""

from __future__ import annotations

import importlib
import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gpuwarden.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gpuwarden.trainer.ranks import Place

log = logging.getLogger(__name__)


def choose_device(words: Mapping[str, Any], place: Place, given: str | None) -> str:
    """Make a rank's device the current one, before anything is computed.

    Args:
        words: ultralytics' words.
        place: this rank's, of several.
        given: the device that gpuwarden's launcher left to this rank, or None.

    Returns:
        Value for ultralytics' word `device`.

    Raises:
        InvalidInput: the devices are not one card for each rank.
    """
    import torch

    said = words.get("device", "")
    text = ",".join(map(str, said)) if isinstance(said, list | tuple) else str(said or "")
    text = text.strip("[]() ").replace(" ", "").removeprefix("cuda:")
    chosen = given or ("cpu" if text == "cpu" else None)
    if chosen is None:
        cards = text.split(",") if text else [str(number) for number in range(place.world)]
        if len(cards) != place.world or not all(card.isdecimal() for card in cards):
            raise InvalidInput(
                f"device={said}: {place.world} ranks need {place.world} cards, such as device="
                + ",".join(str(number) for number in range(place.world))
            )
        chosen = cards[place.rank]
    if chosen != "cpu":
        if not torch.cuda.is_available() or int(chosen) >= torch.cuda.device_count():
            raise InvalidInput(
                f"device={said or chosen}: torch sees {torch.cuda.device_count()} card(s) here; "
                "nvidia-smi -L and $CUDA_VISIBLE_DEVICES say why"
            )
        torch.cuda.set_device(int(chosen))
    return chosen


def prepare(trainer: Any, world: int) -> None:
    """Tell a trainer that was just constructed of how many it is one.

    Raises:
        InvalidInput: settings that several ranks cannot have.
    """
    batch = trainer.batch_size
    if not isinstance(batch, int) or batch < 1:
        raise InvalidInput(
            f"batch={batch}: AutoBatch looks at one card only; say a number, such as {8 * world}"
        )
    if batch % world:
        raise InvalidInput(
            f"batch={batch} cannot be shared among {world} ranks: the batch is that of all "
            f"together; say {max(1, batch // world) * world} or {(batch // world + 1) * world}"
        )
    if trainer.args.rect:
        log.warning("rect=True is for one process: set to False")
        trainer.args.rect = False
    trainer.world_size, trainer.ddp = world, False


def use_device(trainer: Any) -> None:
    """In place of ultralytics' own making of the process group: the ranks have met already."""
    import torch

    if trainer.device.type == "cuda":
        trainer.device = torch.device("cuda", torch.cuda.current_device())


@contextmanager
def on_cpu_too(trainer: Any) -> Iterator[None]:
    """Within, DistributedDataParallel takes what ultralytics says of a CPU rank's device."""
    import torch

    if trainer.world_size <= 1 or trainer.device.type != "cpu":
        yield
        return
    parallel = torch.nn.parallel
    original = parallel.DistributedDataParallel

    class CpuParallel(original):  # type: ignore[misc, valid-type]
        """Without `device_ids`, which name cards."""

        def __init__(self, module: Any, device_ids: Any = None, **kwargs: Any) -> None:
            del device_ids
            super().__init__(module, **kwargs)

    parallel.DistributedDataParallel = CpuParallel
    try:
        yield
    finally:
        parallel.DistributedDataParallel = original


@contextmanager
def evaluated_on_cpu(trainer: Any) -> Iterator[None]:
    """Within, the final evaluation of a CPU rank stays on the CPU: ultralytics expects a card."""
    import torch

    if trainer.world_size <= 1 or trainer.device.type != "cpu":
        yield
        return
    module: Any = importlib.import_module("ultralytics.engine.validator")
    backend, devices = module.AutoBackend, module.get_torch_device_backend

    def on_cpu(*args: Any, **kwargs: Any) -> Any:
        return backend(*args, **{**kwargs, "device": torch.device("cpu")})

    module.AutoBackend, module.get_torch_device_backend = on_cpu, _NoCards
    try:
        yield
    finally:
        module.AutoBackend, module.get_torch_device_backend = backend, devices


class _NoCards:
    """Answers for a device type that the process does not use."""

    def __init__(self, _device: Any) -> None: ...

    def current_device(self) -> int:
        """A number; nothing is done with it."""
        return 0
