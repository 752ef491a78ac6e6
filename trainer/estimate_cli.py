"""`gpuwarden estimate`: what a training will need, before it is started."""

from __future__ import annotations

import json

import click

from gpuwarden.trainer.estimate_answers import Answer
from gpuwarden.trainer.estimate_words import WORDS, parse, probed

_EPILOG = (
    "\b\nWords:\n"
    + "".join(f"  {name:<10} {text}\n" for name, text in WORDS.items())
    + """
\b
Exit status:
  0   said
  1   the training does not fit on the card
  2   wrong usage, or a model or card that nothing is known of

How far off estimates are, and what they rest on: docs/estimates.md.
"""
)


@click.command(
    "estimate",
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.option("--json", "as_json", is_flag=True, help="Machine-readable: bytes, seconds, images/s.")
@click.option(
    "--probe",
    is_flag=True,
    help="Also run 20 steps at two batch sizes on this machine's card, or on its CPU if it has "
    "none; needs ultralytics, and a minute or two.",
)
@click.argument("words", nargs=-1, metavar="KEY=VALUE...")
def estimate(words: tuple[str, ...], *, as_json: bool, probe: bool) -> int:
    """Say what a training will need: memory, speed, time, and the largest batch that fits.

    \u0008
      gpuwarden estimate model=yolov8m batch=64 imgsz=640 gpu="A100 40GB"
      gpuwarden estimate model=yolo11s gpu=T4 data=coco.yaml epochs=100 cores=4
      gpuwarden estimate model=my/model.yaml batch=32 gpu="rtx 4090" --json
      gpuwarden estimate model=yolov8m batch=64 data=my/data.yaml --probe

    Without --probe nothing is run, and nothing is ever downloaded. A YAML that is in no table is
    measured without a card, which takes seconds and needs ultralytics.
    """
    asked = parse(words)
    if probe:
        click.echo("gpuwarden: running some steps of this training, a minute or two ...", err=True)
    answer = Answer.to(asked, probed(asked) if probe else None)
    if as_json:
        click.echo(json.dumps(answer.as_dict(), indent=2))
    else:
        click.echo(answer.as_text())
    return 0 if answer.fits is not False else 1
