"""What `gpuwarden estimate` answers, for people and for machines."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuwarden import estimate_tables, estimates
from gpuwarden.estimates import GIB, Range, Unknown
from gpuwarden.trainer.probes import STEPS

if TYPE_CHECKING:
    from gpuwarden.estimates import Gpu
    from gpuwarden.trainer.estimate_words import Request
    from gpuwarden.trainer.probes import Probe


@dataclass(frozen=True, slots=True)
class Answer:
    """What is said.

    Attributes:
        request: what was asked.
        memory: on each card.
        speed: None where no card is named.
        images: per second, also bounded by the loaders; None likewise.
        limit: what bounds them, in words.
        largest: batch over all cards that is sure to fit; None likewise.
        workers: loader processes for each card; None likewise.
        fits: whether the batch is expected to; None likewise.
        probe: what was measured on this device, or None.
    """

    request: Request
    memory: estimates.Memory
    speed: estimates.Speed | None
    images: Range | None
    limit: str
    largest: int | None
    workers: int | None
    fits: bool | None
    probe: Probe | None = None

    @classmethod
    def to(cls, request: Request, probe: Probe | None = None) -> Answer:
        """Work the answer out.

        Args:
            request: what was asked; where it names no card, the probed one is meant.
            probe: what was measured.
        """
        if probe is not None and request.gpu is None:
            found = estimate_tables.find_gpu(probe.device)
            if not isinstance(found, Unknown):
                request = dataclasses.replace(request, gpu=found)
        constants = estimate_tables.tables().constants
        model, gpu, workload = request.model, request.gpu, request.workload
        memory = estimates.memory(model, workload, constants)
        if gpu is None:
            return cls(request, memory, None, None, "", None, None, None, probe)
        speed = estimates.speed(model, gpu, workload, constants)
        images, limit = speed.images, speed.limit
        workers = estimates.loader_workers(
            images.expected / workload.gpus, workload.imgsz, constants
        )
        if request.cores is not None:
            most = workload.gpus * estimates.loader_limit(request.cores, workload.imgsz, constants)
            if most < images.expected:
                limit = "data loading"
            images = Range(*(min(value, most) for value in dataclasses.astuple(images)))
            workers = min(workers, request.cores)
        return cls(
            request,
            memory,
            speed,
            images,
            limit,
            estimates.largest_batch(model, gpu.memory, workload=workload, constants=constants),
            workers,
            memory.total.expected <= gpu.memory,
            probe,
        )

    @property
    def seconds(self) -> Range | None:
        """For one epoch of the data set, without validation."""
        if self.images is None or self.request.images is None:
            return None
        images = self.request.images
        return Range(
            images / self.images.high, images / self.images.expected, images / self.images.low
        )

    def as_dict(self) -> dict[str, Any]:
        """For machines: bytes, seconds, images per second; what is not known is absent."""
        request = self.request
        found: dict[str, Any] = {
            "model": {
                "name": request.model.name,
                "task": request.model.task,
                "parameters": request.model.parameters,
                "gigaflops": request.model.gigaflops,
            },
            "workload": dataclasses.asdict(request.workload),
            "memory_reserved_bytes": _rounded(self.memory.reserved),
            "memory_total_bytes": _rounded(self.memory.total),
            "sources": self.sources(),
        }
        if request.gpu is not None and self.images is not None and self.speed is not None:
            found |= {
                "gpu": {
                    "name": request.gpu.name,
                    "memory_bytes": round(request.gpu.memory),
                    "measured": request.gpu.measured,
                },
                "fits": self.fits,
                "largest_batch": self.largest,
                "images_per_second": _rounded(self.images, digits=1),
                "limit": self.limit,
                "filling_batch": self.speed.filling_batch,
                "workers": self.workers,
            }
        if self.seconds is not None:
            found |= {
                "images": request.images,
                "epochs": request.epochs,
                "epoch_seconds": _rounded(self.seconds, digits=1),
                "training_seconds": _rounded(self.seconds.scaled(request.epochs), digits=1),
            }
        if self.probe is not None:
            found["probe"] = {
                **dataclasses.asdict(self.probe),
                "image_seconds": self.probe.image_seconds,
                "fixed_seconds": self.probe.fixed_seconds,
                "image_bytes": self.probe.image_bytes,
                "fixed_bytes": self.probe.fixed_bytes,
                "images_per_second": self.probe.images_per_second,
                "wait_share": self.probe.wait_share,
            }
        return found

    def sources(self) -> list[str]:
        """What the numbers rest on."""
        found = [f"{self.request.model.name}: {self.request.model.source}"]
        gpu = self.request.gpu
        if gpu is not None:
            known = "public trainings on it" if gpu.measured else "no public training on it"
            found.append(f"{gpu.name}: {gpu.source}; {known} among the figures")
        found.append("constants: fitted on public figures, see docs/estimates.md")
        return found

    def as_text(self) -> str:
        """For people."""
        request, workload = self.request, self.request.workload
        cards = f"{workload.gpus} x " if workload.gpus > 1 else ""
        where = f" on {cards}{request.gpu.name}" if request.gpu is not None else ""
        lines = [
            (
                f"{request.model.name} ({request.model.task}, "
                f"{request.model.parameters / 1e6:.1f} M parameters), batch {workload.batch}, "
                f"{workload.imgsz} px, {'AMP' if workload.amp else 'no AMP'}, "
                f"{workload.optimizer}{where}"
            ),
            "",
            _line("memory", f"{_gib(self.memory.reserved)} reserved by torch (GPU_mem)"),
            _line("", f"{_gib(self.memory.total)} as nvidia-smi shows it"),
        ]
        if request.gpu is None:
            lines.append(_line("speed", 'not without a card: say gpu="A100 40GB", for example'))
        else:
            lines += self._on_card(request.gpu)
        lines += self._probed()
        return "\n".join([*lines, "", "rests on", *(f"  {item}" for item in self.sources())])

    def _on_card(self, gpu: Gpu) -> list[str]:
        if self.images is None or self.speed is None:
            return []
        workload = self.request.workload
        share = self.memory.total.expected / gpu.memory
        if not self.fits:
            verdict = f"does not fit: {share:.0%} of {gpu.memory / GIB:.1f} GiB"
        elif self.memory.total.high > gpu.memory:
            verdict = f"may not fit: {share:.0%} of {gpu.memory / GIB:.1f} GiB"
        else:
            verdict = f"fits: {share:.0%} of {gpu.memory / GIB:.1f} GiB"
        lines = [
            _line("", verdict),
            _line("largest", f"batch {self.largest}, by the upper end of its memory"),
            _line(
                "speed",
                f"{self.images.expected:.0f} images/s ({self.images.low:.0f} to "
                f"{self.images.high:.0f}), bound by {self.limit}",
            ),
        ]
        if self.limit == "launches" and self.speed.filling_batch > workload.batch:
            lines.append(
                _line("", f"a step takes no less time below batch {self.speed.filling_batch}")
            )
        seconds = self.seconds
        if seconds is not None:
            lines.append(_line("epoch", f"{_spans(seconds)}, {self.request.images} images"))
            if self.request.epochs > 1:
                lines.append(
                    _line(
                        "training",
                        f"{_spans(seconds.scaled(self.request.epochs))}, "
                        f"{self.request.epochs} epochs, without validation",
                    )
                )
        lines.append(_line("workers", f"{self.workers} for each card"))
        return lines

    def _probed(self) -> list[str]:
        """What was measured, beside what is estimated."""
        probe = self.probe
        if probe is None:
            return []
        lines = [
            "",
            (
                f"measured on {probe.device}: {STEPS} steps each of batch {probe.few.batch} and "
                f"{probe.many.batch}"
            ),
            _line("step", f"{_ms(probe.fixed_seconds)} and {_ms(probe.image_seconds)} per image"),
            _line(
                "speed",
                f"{probe.images_per_second:.1f} images/s; {probe.wait_share:.0%} of the time went "
                f"into waiting for data ({probe.workers} workers)",
            ),
            _line("loading", f"{_ms(probe.loader_seconds)} per image and core"),
        ]
        if probe.many.memory is not None and probe.image_bytes and probe.fixed_bytes is not None:
            lines.append(
                _line(
                    "memory",
                    f"{probe.many.memory / GIB:.1f} GiB reserved: {probe.fixed_bytes / GIB:.2f} "
                    f"and {probe.image_bytes / GIB:.3f} per image",
                )
            )
            if self.request.gpu is not None:
                largest = probe.largest_batch(self._available(self.request.gpu))
                lines.append(_line("largest", f"batch {largest}, with a twentieth to spare"))
        return lines

    @staticmethod
    def _available(gpu: Gpu) -> float:
        """What torch can reserve with some room for what validation and other batches add."""
        return 0.95 * gpu.memory - estimate_tables.tables().constants.context_bytes


def _rounded(value: Range, digits: int | None = None) -> dict[str, float]:
    return {key: round(number, digits) for key, number in dataclasses.asdict(value).items()}


def _line(name: str, text: str) -> str:
    return f"{name:<9} {text}".rstrip()


def _gib(value: Range) -> str:
    return f"{value.expected / GIB:.1f} GiB ({value.low / GIB:.1f} to {value.high / GIB:.1f})"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"


def _spans(value: Range) -> str:
    return f"{_span(value.expected)} ({_span(value.low)} to {_span(value.high)})"


_SPANS = ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s"))


def _span(seconds: float) -> str:
    """Seconds as people say them: 45s, 12m30s, 3h20m, 4d6h."""
    whole = max(1, round(seconds))
    for size, unit, below, lower in _SPANS:
        if whole >= size:
            rest = whole % size // below
            return f"{whole // size}{unit}" + (f"{rest}{lower}" if rest else "")
    return f"{whole}s"
