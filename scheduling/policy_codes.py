"""What each diagnostic code of policy files means; part of docs/policy-reference.md."""

from __future__ import annotations

from gpuwarden.form_codes import FORM_CODES

CODES: dict[str, str] = {
    **FORM_CODES,
    "GW600": "The name is used by another of its kind.",
    "GW601": "Nothing of this name is defined in the file.",
    "GW602": "A priority preempts itself, or one that is not lower.",
    "GW603": "Something here asks jobs to leave, and `preemption` does not say how.",
    "GW604": "More cards are promised as quotas than there are.",
    "GW605": "The engine needs a part that is missing.",
    "GW606": "The image is not pinned by its digest.",
    "GW607": "The engine would take two of these for the same, or one for its own.",
    "GW608": "The policy knows no prices: budgets here are in GPU-hours.",
    "GW609": "More than one priority is the default.",
    "GW610": "The engine cannot do this in the way that the policy wants it.",
    "GW650": "Warning: nobody lends what could be borrowed, or nobody borrows what is lent.",
    "GW651": "Warning: the budget is never reached, or another one is always reached first.",
    "GW652": "Warning: on some day the clocks skip or repeat the time of a window.",
    "GW653": "Warning: little time to save and leave.",
    "GW654": "Warning: somebody is in several teams, and has to name one at each submission.",
    "GW655": "Warning: nobody can use this.",
    "GW656": "Warning: cards may still be taken when their owner, or a slot, wants them.",
    "GW657": "Warning: whom a priority preempts is not what its place among the others suggests.",
    "GW658": "Warning: this bound can never be reached.",
    "GW659": "Warning: this machine knows nobody of that name (`policy check --here`).",
}
"""Code -> meaning. GW1xx is about form, GW60x about meaning, GW65x are warnings."""
