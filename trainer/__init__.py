"""In the training's environment: publishes what the training does; saves and leaves when asked.

`gpuwarden train` is the command; from Python, `attach(model)` gives `model.train` the same
behaviour. Importing this package imports neither torch nor ultralytics.
"""

from __future__ import annotations

from gpuwarden.trainer.attaching import LeftTraining, attach
from gpuwarden.trainer.leaving import leave_pending

__all__ = ["LeftTraining", "attach", "leave_pending"]
