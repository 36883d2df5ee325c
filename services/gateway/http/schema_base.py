"""The base class of request models, and the building blocks of their validation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Discriminator, Field, model_validator
from pydantic_core import PydanticCustomError

IGNORED = "This field is accepted and has no effect."
UNSUPPORTED = "unsupported"


def conflict(param: str, message: str) -> PydanticCustomError:
    """Return the error for a parameter that contradicts another one."""
    return PydanticCustomError("conflict", "{message}", {"param": param, "message": message})


def unsupported(message: str) -> PydanticCustomError:
    """Return the error for a known parameter that this server does not support.

    message: the reason
    """
    return PydanticCustomError(UNSUPPORTED, "{message}", {"message": message})


def refuse_with(message: str) -> AfterValidator:
    """Return a validator that refuses every value with this reason, except false and empty values."""

    def refuse(value: Any) -> Any:
        if value:
            raise unsupported(message)
        return value

    return AfterValidator(refuse)


NULL_ONLY = Field(json_schema_extra={"type": "null"})


def missing_parameter(param: str) -> PydanticCustomError:
    """Return the error for a missing parameter that other parameters require."""
    return PydanticCustomError("missing", "Field required", {"param": param})


class RequestModel(BaseModel):
    """The base of all request models: strict types, no unknown fields, and null means that a field is absent."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, value: Any) -> Any:
        return {name: item for name, item in value.items() if item is not None} if isinstance(value, dict) else value


class Lenient(RequestModel):
    """The base of objects whose unknown fields are ignored: clients send them to every server, or send them back."""

    model_config = ConfigDict(extra="ignore")


# Tags of the members of unions: pydantic validates a value as the member that its tag names, so that an error is about
# that member alone. `_path` of request_body.py removes the tags from the path of a field.
TEXT, TEXTS, TOKENS, TOKEN_LISTS = "[text]", "[texts]", "[tokens]", "[lists of tokens]"
PARTS, ITEMS = "[parts]", "[items]"
MODE, FUNCTION, ALLOWED, UNREAD = "[mode]", "[function]", "[allowed]", "[unread]"
CALL, RESULT, THINKING = "[call]", "[result]", "[thinking]"
SWITCH, NUMBER, SCHEMA = "[switch]", "[number]", "[schema]"
UNION_TAGS = (
    *(TEXT, TEXTS, TOKENS, TOKEN_LISTS, PARTS, ITEMS, MODE, FUNCTION, ALLOWED, UNREAD, CALL, RESULT, THINKING),
    *(SWITCH, NUMBER, SCHEMA),
)


def union_of(message: str, tag_of: Callable[[Any], str | None]) -> Discriminator:
    """Return a discriminator for a union.

    message: the error for a value that belongs to no member
    tag_of: returns the tag of a value's member, None if the value belongs to none
    """
    return Discriminator(tag_of, custom_error_type="kind", custom_error_message=message)


def text_or(list_tag: str) -> Callable[[Any], str | None]:
    """Return the tag function of a union of a string and a list, which has the tag list_tag."""
    return lambda value: TEXT if isinstance(value, str) else list_tag if isinstance(value, list) else None
