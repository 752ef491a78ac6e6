"""How a job ended, in a sentence for its owner that says what to do. Pure."""

from __future__ import annotations

from typing import Final

from gpuwarden.job_files import EXIT_HOLD, EXIT_REQUEUE

AGAIN: Final = "submit it anew with the same words and --name, and it goes on from its newest state"
_STATES: Final = {
    "TIMEOUT": f"it was ended at its time limit{{status}}: {AGAIN}",
    "DEADLINE": f"it could not be done by its deadline{{status}}: {AGAIN}",
    "OUT_OF_MEMORY": (
        "it ended{status}, for it used more of its node's memory than it had asked for: submit it "
        "with fewer workers or without cache=ram, or have the operators give more with a card "
        "(host_memory of the policy)"
    ),
    "NODE_FAIL": f"its node failed{{status}}, and Slurm did not queue it again: {AGAIN}",
    "BOOT_FAIL": f"its node did not come up{{status}}: {AGAIN}",
    "REVOKED": "another cluster of the federation runs it{status}",
}
_STATUSES: Final = {
    EXIT_REQUEUE: (
        f"it saved and left (status {EXIT_REQUEUE}), and Slurm did not queue it again: `scontrol "
        f"requeue` does, unless it was submitted with --no-requeue; then {AGAIN}"
    ),
    EXIT_HOLD: (
        f"it saved and left for good (status {EXIT_HOLD}): look into its log; `scontrol requeue` "
        "has it go on"
    ),
}


def end_words(state: str, status: int | None) -> str:
    """How a job that did not succeed ended; begins with a small letter and has no full stop.

    Args:
        state: Slurm's word.
        status: its exit status, or None.
    """
    said = f" with status {status}" if status else ""
    if state in _STATES:
        return _STATES[state].replace("{status}", said)
    if state == "FAILED" and status in _STATUSES:
        return _STATUSES[status]
    return f"it ended as {state.lower().replace('_', ' ')}{said}"
