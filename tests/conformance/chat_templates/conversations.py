"""The conversations of the golden prompts, as requests of OpenAI's API have them, except that arguments are objects.

Ids of calls have nine letters and digits, since Mistral's templates accept no others. Text has characters outside of
ASCII, quotes, markup, and white space at its ends.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Message = dict[str, Any]


class Conversation(NamedTuple):
    """A conversation.

    answer: True if the assistant's answer comes next
    continued: True if the last message is the beginning of that answer
    variables: variables of the chat template
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    answer: bool = True
    continued: bool = False
    variables: dict[str, Any] = {}  # noqa: RUF012


def _call(id_: str, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _calling(*calls: dict[str, Any], **more: str) -> Message:
    return {"role": "assistant", "content": None, **more, "tool_calls": [*calls]}


def _result(id_: str, name: str, content: str) -> Message:
    return {"role": "tool", "name": name, "tool_call_id": id_, "content": content}


FORECAST = {
    "type": "function",
    "function": {
        "name": "get_forecast",
        "description": 'Wetter für eine Stadt (°C) - "kurz" & <genau>.',
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name der Stadt, z. B. Köln"},
                "days": {"type": "integer", "description": "How many days", "default": 1, "minimum": 1},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
            },
            "required": ["city"],
        },
    },
}
BOOK = {
    "type": "function",
    "function": {
        "name": "book_table",
        "description": "Books a table.",
        "parameters": {
            "type": "object",
            "properties": {
                "guests": {"type": "array", "items": {"type": "string"}},
                "place": {
                    "type": "object",
                    "properties": {"street": {"type": "string"}, "inside": {"type": "boolean"}},
                    "required": ["street"],
                },
            },
            "required": ["guests", "place"],
        },
    },
}
_SYSTEM = {"role": "system", "content": "Be brief.  "}
_ASKS = {"role": "user", "content": " What is the weather in Köln? <b>"}
_ANSWERS = {"role": "assistant", "content": "It rains."}
_ASKS_AGAIN = {"role": "user", "content": "And tomorrow?\n"}
_THINKS = {"role": "assistant", "content": "Yes, 12.", "reasoning_content": "The user means Köln."}
_BEGINS = {"role": "assistant", "content": "Well, it"}
_FIRST = _call("call00001", "get_forecast", {"city": "Köln", "days": 2})
_SECOND = _call("call00002", "get_forecast", {"city": "東京", "unit": "celsius"})
_THIRD = _call("call00003", "book_table", {"guests": ["Zoë"], "place": {"street": 'Elm "5"', "inside": True}})
_RAIN = _result("call00001", "get_forecast", '{"sky": "Regen", "°C": 12}')
_SUN, _DONE = _result("call00002", "get_forecast", "sunny"), _result("call00003", "book_table", "done")

CONVERSATIONS = {
    "one question": Conversation([_ASKS]),
    "system": Conversation([_SYSTEM, _ASKS]),
    "several turns": Conversation([_SYSTEM, _ASKS, _ANSWERS, _ASKS_AGAIN]),
    "several turns without system": Conversation([_ASKS, _ANSWERS, _ASKS_AGAIN]),
    "complete": Conversation([_SYSTEM, _ASKS, _ANSWERS], answer=False),
    "thoughts": Conversation([_ASKS, _THINKS, _ASKS_AGAIN]),
    "thinking on": Conversation([_ASKS], variables={"enable_thinking": True}),
    "thinking off": Conversation([_ASKS, _THINKS, _ASKS_AGAIN], variables={"enable_thinking": False}),
    "continued": Conversation([_SYSTEM, _ASKS, _BEGINS], continued=True),
    "continued later": Conversation([_ASKS, _ANSWERS, _ASKS_AGAIN, _BEGINS], continued=True),
    "tools": Conversation([_SYSTEM, _ASKS], [FORECAST, BOOK]),
    "a tool without system": Conversation([_ASKS], [FORECAST]),
    "a call": Conversation([_SYSTEM, _ASKS, _calling(_FIRST), _RAIN], [FORECAST]),
    "a call after text": Conversation([_ASKS, _calling(_FIRST, content="I look."), _RAIN], [FORECAST]),
    "a call after thoughts": Conversation([_ASKS, _calling(_FIRST, reasoning_content="I look."), _RAIN], [FORECAST]),
    "two calls": Conversation([_ASKS, _calling(_SECOND, _THIRD), _SUN, _DONE, _ANSWERS, _ASKS_AGAIN], [BOOK]),
    "call by call": Conversation([_ASKS, _calling(_FIRST), _RAIN, _calling(_SECOND), _SUN], [FORECAST]),
}
