"""What all bodies of requests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, model_validator
from pydantic_core import PydanticCustomError

IGNORED = "accepted, and without effect"
UNSUPPORTED = "not_served"


def conflict(param: str, said: str) -> PydanticCustomError:
    """What is wrong with a parameter only because of another one."""
    return PydanticCustomError("beside_others", "{said}", {"param": param, "said": said})


def unsupported(said: str) -> PydanticCustomError:
    """A parameter that is understood and not served, and why."""
    return PydanticCustomError(UNSUPPORTED, "{said}", {"said": said})


def refuse_with(said: str) -> AfterValidator:
    """Whatever is given is refused for this reason; what says nothing is not given."""

    def refuse(value: Any) -> Any:
        if value:
            raise unsupported(said)
        return value

    return AfterValidator(refuse)


NULL_ONLY = Field(json_schema_extra={"type": "null"})


def missing_parameter(param: str) -> PydanticCustomError:
    """A parameter that others make necessary."""
    return PydanticCustomError("missing", "Field required", {"param": param})


class RequestModel(BaseModel):
    """What all parts of a request share."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value


# What a value is where it may be one of several things: errors then speak of that one.
TEXT, TEXTS, TOKENS, TOKEN_LISTS, PARTS, ITEMS = (
    "[text]",
    "[texts]",
    "[tokens]",
    "[lists of tokens]",
    "[parts]",
    "[items]",
)
MODE, FUNCTION, ALLOWED, UNREAD = ("[mode]", "[named]", "[allowed]", "[unread]")
UNION_TAGS = (TEXT, TEXTS, TOKENS, TOKEN_LISTS, PARTS, ITEMS, MODE, FUNCTION, ALLOWED, UNREAD)


def union_of(said: str, kind: Callable[[Any], str | None]) -> Discriminator:
    """Tells kinds apart; what is none of them was expected to be what is said."""
    return Discriminator(kind, custom_error_type="kind", custom_error_message=said)


def text_or(many: str) -> Callable[[Any], str | None]:
    """A text, or a list of the kind `many`."""
    return lambda value: TEXT if isinstance(value, str) else many if isinstance(value, list) else None
