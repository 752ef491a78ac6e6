"""gpuwarden: fair use of shared GPUs for YOLO training."""

__version__ = "0.1.0"
