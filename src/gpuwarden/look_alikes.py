"""Characters that look like those of a language, or like nothing, and are others.

They come from pages, word processors and input methods: a per cent sign or a colon of full width, a
no-break space in an indent, a Cyrillic letter in a word. In a message they look right, so that they
are named.
"""

from __future__ import annotations

import unicodedata
from typing import Final

_LETTERS: Final = dict(
    zip(
        "\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0456\u0458\u0455\u0501\u0391\u0392\u0395\u0396\u0397"
        "\u0399\u039a\u039c\u039d\u039f\u03a1\u03a4\u03a5\u03a7\u0410\u0412\u0415\u041a\u041c\u041d\u041e"
        "\u0420\u0421\u0422\u0425\u03bf\u03bd\u0131",
        "aeopcyxijsdABEZHIKMNOPTYXABEKMHOPCTXovi",
        strict=True,
    )
)
"""Cyrillic and Greek letters, and what Latin ones they are taken for."""
_SIGNS: Final = {
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2212", "-"),
    **dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb", '"'),
    **dict.fromkeys("\u2018\u2019\u201a", "'"),
    "\u3001": ",",
    "\u3002": ".",
    "\u2236": ":",
}
_INVISIBLE: Final = frozenset({"Cf", "Zs", "Zl", "Zp", "Cc"})
"""Categories of characters that show nothing, or a space."""


def look_alike(text: str) -> str | None:
    """What the first character that is not what it looks like is, in a few words; or None.

    Args:
        text: what somebody wrote, where only the characters of a language are expected.
    """
    for character in text:
        if character.isascii():
            continue
        name = unicodedata.name(character, f"U+{ord(character):04X}")
        plain = unicodedata.normalize("NFKC", character)
        meant = _SIGNS.get(character) or _LETTERS.get(character) or plain
        if unicodedata.category(character) in _INVISIBLE:
            return f"it holds {name}, which does not show: write it anew"
        if meant.isascii():
            return f"{character} is {name}: write {meant}"
    return None
