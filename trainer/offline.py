"""A training that opens no connection of its own accord.

Ultralytics looks things up when it is imported, asks for updates and sends statistics, and fetches
what it does not find: fonts, weights, data sets. On a node without a way out each of these waits
for its time-out; on one with a way out it is a download that nobody asked for.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_DEFAULTS = {"YOLO_OFFLINE": "1", "YOLO_AUTOINSTALL": "0"}
"""What ultralytics reads when it is imported; a user's own choice stands."""


def choose(*, online: bool) -> None:
    """Decide before ultralytics is imported, also for ranks and loader workers.

    Args:
        online: the user lets it use the network, whatever an image's variables say.
    """
    if online:
        os.environ["YOLO_OFFLINE"] = "0"
    else:
        for name, value in _DEFAULTS.items():
            if not os.environ.get(name):
                os.environ[name] = value


def chosen() -> bool:
    """Whether ultralytics was told to stay offline."""
    return os.environ.get("YOLO_OFFLINE", "").lower() in ("1", "true")


def prepare() -> None:
    """Where it was told so, close the ways that it would take all the same."""
    if not chosen():
        return
    _place_font()
    downloads: Any = importlib.import_module("ultralytics.utils.downloads")
    data: Any = importlib.import_module("ultralytics.data.utils")
    engine: Any = importlib.import_module("ultralytics.engine.trainer")
    if downloads.safe_download is _refuse:
        return
    is_url = downloads.is_url

    def is_url_unasked(url: Any, check: bool = False) -> bool:
        return bool(is_url(url, check=False)) and not check

    downloads.is_url = is_url_unasked
    downloads.get_github_assets = lambda *_, **__: ("", [])
    for module in (downloads, data):
        module.safe_download = _refuse
    data.download = _refuse
    engine.check_amp = functools.partial(_check_amp, engine.check_amp)
    engine.check_det_dataset = functools.partial(engine.check_det_dataset, autodownload=False)


def _check_amp(check: Callable[[Any], bool], model: Any) -> bool:
    """Ultralytics' check of mixed precision, which compares by weights that it would download.

    Where they are missing it passes by itself; where a download was once cut short they are there
    and cannot be read, which would end the training.
    """
    try:
        return check(model)
    except Exception as error:  # noqa: BLE001 -- whatever loading broken weights raises
        log.warning(
            "mixed precision was not checked (%s): it stays on; amp=False turns it off", error
        )
        return True


def _refuse(url: Any = "", *_: Any, **__: Any) -> Any:
    """Stands in for ultralytics' downloads.

    Raises:
        ConnectionError: always; ultralytics takes it for a network that is not there.
    """
    raise ConnectionError(
        f"{url} is not on this machine, and nothing is downloaded unasked: put it here, or say "
        "--online"
    )


def _place_font() -> None:
    """Spare ultralytics the look-up of fonts.

    It asks the network for Arial when neither its own folder nor the system has it; a copy of
    matplotlib's DejaVu Sans under that name in ultralytics' folder answers it.
    """
    import matplotlib as mpl
    from ultralytics.utils import USER_CONFIG_DIR

    source = Path(mpl.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"
    for name in ("Arial.ttf", "Arial.Unicode.ttf"):  # the other for names of classes beyond ASCII
        font = Path(USER_CONFIG_DIR) / name
        if font.exists() or not source.exists():
            continue
        temporary = font.with_name(f".{name}.{os.getpid()}.tmp")
        try:
            shutil.copyfile(source, temporary)
            temporary.replace(font)
        except OSError as error:
            log.warning("cannot write %s (%s): ultralytics may look for it online", font, error)
