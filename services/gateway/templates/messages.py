"""Messages of a conversation: in the form that chat templates take, or as plain text if a template has no tools."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from neuronpipe.services.gateway.templates.call_format import (
    DEFAULT,
    RESULT,
    CallFormat,
    Message,
    instruction,
    numbered_id,
    reasoning_fields,
)

Tools = Sequence[dict[str, Any]]
"""Functions that an answer may call, as in OpenAI's API."""


class ChatTurn(NamedTuple):
    """A message of a request.

    calls: ids, names and arguments of its function calls
    reasoning: what the assistant thought before it
    """

    role: str
    text: str
    name: str | None = None
    tool_call_id: str | None = None
    calls: Sequence[tuple[str, str, str]] = ()
    reasoning: str = ""


def as_messages(turns: Sequence[ChatTurn], form: CallFormat) -> list[Message]:
    """Return messages in the form that templates take.

    "developer", the newer name of "system", becomes "system", and results get the name of their function.
    """
    turns = _with_numbered_ids(turns) if form.numbered_ids else turns
    names = {id_: name for turn in turns for id_, name, _ in turn.calls}
    return [_as_message(turn, form, names) for turn in turns]


def _with_numbered_ids(turns: Sequence[ChatTurn]) -> list[ChatTurn]:
    """Return the conversation with the ids that a template writes in place of names, in calls and results."""
    ids, count, numbered = dict[str, str](), 0, list[ChatTurn]()
    for turn in turns:
        calls = [(numbered_id(call[1], count + at), *call[1:]) for at, call in enumerate(turn.calls)]
        ids |= {old[0]: new[0] for old, new in zip(turn.calls, calls, strict=True)}
        count += len(calls)
        result_of = turn.tool_call_id and ids.get(turn.tool_call_id, turn.tool_call_id)
        numbered.append(turn._replace(calls=calls, tool_call_id=result_of))
    return numbered


def as_texts(
    turns: Sequence[ChatTurn], tools: Tools | None, form: CallFormat = DEFAULT, by: str = "system"
) -> list[Message]:
    """Return the conversation with tools, calls and results written as text.

    by: the role of the message that describes the tools: its first one, which for "system" must be the conversation's
        first; without one, a new message is inserted at the beginning
    """
    messages: list[Message] = []
    after_result = False
    for turn in turns:
        result = turn.role == "tool"
        if turn.calls:
            calls = DEFAULT.written([(name, arguments) for _, name, arguments in turn.calls])
            message: Message = {"role": "assistant", "content": f"{turn.text}\n{calls}" if turn.text else calls}
        elif result:
            message = {"role": "user", "content": RESULT.format(turn.text)}
        else:
            message = _as_message(turn, DEFAULT, {})
        if messages and message["role"] == messages[-1]["role"] == "user" and (result or after_result):
            messages[-1]["content"] += "\n" + message["content"]  # templates want the roles to alternate
        else:
            messages.append(message)
        after_result = result
    if tools is not None:
        _tell_functions(messages, instruction(tools, form), by)
    return messages


def _as_message(turn: ChatTurn, form: CallFormat, names: Mapping[str, str]) -> Message:
    """Return one message.

    names: names of called functions, by the ids of their calls
    """
    if turn.calls:
        return form.message(turn.text, turn.calls, turn.reasoning)
    message: Message = {"role": "system" if turn.role == "developer" else turn.role, "content": turn.text}
    message |= reasoning_fields(turn.reasoning)
    if turn.name is not None:
        message["name"] = turn.name
    if turn.role == "tool" and turn.tool_call_id is not None:
        message["tool_call_id"] = form.id_of(turn.tool_call_id)
        if turn.tool_call_id in names:
            message.setdefault("name", names[turn.tool_call_id])
    return message


def shows_function(text: str, tools: Tools) -> bool:
    """Return True if a prompt describes these functions, judged by the name of the first."""
    return json.dumps(tools[0]["function"]["name"]) in text


def _tell_functions(messages: list[Message], text: str, by: str) -> None:
    place = next((message for message in messages if message["role"] == by), None)
    if by == "system" and messages[0] is not place:
        place = None
    if place is None:
        messages.insert(0, {"role": by, "content": text})
    elif by == "system":
        place["content"] += f"\n\n{text}"
    else:
        place["content"] = f"{text}\n\n{place['content']}"
