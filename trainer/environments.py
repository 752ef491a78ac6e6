"""What the training finds around it: the user's own trainer, versions, and no network."""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import shutil
import sys
from pathlib import Path

from gpuwarden import __version__
from gpuwarden.errors import InvalidInput

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


def prepare_offline() -> None:
    """With YOLO_OFFLINE=1, spare ultralytics the one look-up it would still make: for a font.

    It asks the network for Arial when neither its own folder nor the system has it; a copy of
    matplotlib's DejaVu Sans under that name in ultralytics' folder answers it.
    """
    if os.environ.get("YOLO_OFFLINE", "").lower() not in ("1", "true"):
        return
    import matplotlib as mpl
    from ultralytics.utils import USER_CONFIG_DIR

    font = Path(USER_CONFIG_DIR) / "Arial.ttf"
    source = Path(mpl.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    if not font.exists() and source.exists():
        try:
            shutil.copyfile(source, font)
        except OSError as error:
            log.warning("cannot write %s (%s): ultralytics may look for it online", font, error)
