"""Who trains next: one policy, rendered into the engines that people run."""
