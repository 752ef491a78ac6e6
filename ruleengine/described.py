"""A sentence that an operator writes for owners: in one language, or in several."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from gpuwarden.ruleengine.texts.speeches import LANGUAGES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.ruleengine.texts.speeches import Language


class Described(str):
    """The text as such, English where there is any, which knows its other languages."""

    __slots__ = ("languages",)
    languages: Mapping[str, str]

    @classmethod
    def of(cls, languages: Mapping[str, str]) -> Self:
        """One text for each language."""
        made = cls(languages.get("en") or next(iter(languages.values()), ""))
        made.languages = MappingProxyType(dict(languages))
        return made


def described(text: str, language: Language) -> str:
    """The text in a language; as it is where it was written in none, or not in this one."""
    if not isinstance(text, Described):
        return text
    return text.languages.get(language, str(text))


def _described(value: object) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, dict) or not value:
        raise PydanticCustomError(
            "GW106",
            "must be a sentence, or one for each language: {example}",
            {"example": "{en: ..., zh: ...}"},
        )
    texts: dict[str, Any] = value
    for language, text in texts.items():
        if language not in LANGUAGES:
            raise PydanticCustomError(
                "GW104",
                "{language} is not a language of notices",
                {
                    "language": repr(language),
                    "known": LANGUAGES,
                    "word": str(language),
                    "at": (str(language),),
                },
            )
        if not isinstance(text, str) or not text:
            raise PydanticCustomError("GW106", "must be a sentence", {"at": (language,)})
    return Described.of(texts)


def _written(text: str) -> str | dict[str, str]:
    """As a file has it."""
    return dict(text.languages) if isinstance(text, Described) else text


Sentences = Annotated[
    str,
    PlainValidator(_described),
    PlainSerializer(_written),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "object",
                    "properties": {name: {"type": "string", "minLength": 1} for name in LANGUAGES},
                    "additionalProperties": False,
                    "minProperties": 1,
                },
            ]
        }
    ),
]
"""One sentence, or one for each language: `{en: ..., zh: ...}`."""
