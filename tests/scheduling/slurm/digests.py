"""A paced trainer that writes down what it has learnt, so that two processes can be compared."""

from __future__ import annotations

import json
from pathlib import Path

from demo.paced import PacedTrainer
from tests.trainer.trainings import digest_of


class Digesting(PacedTrainer):
    """Beside its results: sums of model, EMA, optimizer and results, as of the last epoch."""

    def final_eval(self) -> None:
        """What was learnt is complete; what follows makes smaller files of it."""
        path = Path(self.save_dir) / "digest.json"
        path.write_text(json.dumps(digest_of(self)), "utf-8")
        super().final_eval()
