"""What the training finds around it: the user's own trainer, versions, whole label caches."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwarden import __version__
from gpuwarden.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuwarden.trainer.leaving import LeaveWatch

log = logging.getLogger(__name__)


def named_class(name: str | type | None) -> type | None:
    """The class that `MODULE:CLASS` names.

    Raises:
        InvalidInput: there is none, or it is no trainer.
    """
    from ultralytics.engine.trainer import BaseTrainer

    if name is None or isinstance(name, type):
        return name
    module, _, attribute = name.partition(":")
    if str(Path.cwd()) not in sys.path:  # a command's own folder is there, the user's is not
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InvalidInput(f"trainer {name!r}: {error}; write MODULE:CLASS") from error
    if not (isinstance(found, type) and issubclass(found, BaseTrainer)):
        raise InvalidInput(f"trainer {name!r} is not a subclass of ultralytics' BaseTrainer")
    return found


def software() -> dict[str, str]:
    """Versions that a state was written by."""
    versions = {"gpuwarden": __version__}
    for name in ("torch", "ultralytics"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "unknown"
    return versions


@contextmanager
def whole_label_caches(watch: LeaveWatch) -> Iterator[None]:
    """Within, a signal does not tear a label cache that ultralytics is writing.

    Args:
        watch: of the signals.
    """
    module: Any = importlib.import_module("ultralytics.data.dataset")
    save = module.save_dataset_cache_file

    def save_whole(*args: Any, **kwargs: Any) -> Any:
        with watch.shielded():
            return save(*args, **kwargs)

    module.save_dataset_cache_file = save_whole
    try:
        yield
    finally:
        module.save_dataset_cache_file = save
