"""What the codes of findings about a file's form mean, whatever the file is about."""

from __future__ import annotations

FORM_CODES: dict[str, str] = {
    "GW100": "The file cannot be read.",
    "GW101": "The file is not YAML.",
    "GW102": "A key is given twice in one mapping.",
    "GW103": "The key is not known here.",
    "GW104": "The word is none of those that are allowed here.",
    "GW105": "A key is missing; the place is the start of its mapping.",
    "GW106": "The value is of the wrong type.",
    "GW107": "The value cannot be read: a unit, pattern, zone or moment is wrong or missing.",
    "GW108": "A feature of YAML that is refused here: tags, deep nesting, unbounded aliases.",
    "GW109": "The number is out of range.",
    "GW111": "Too few or too many of the keys of which one is needed, or an empty list.",
}
"""Code -> meaning."""
