"""The format in which a model writes function calls: found in its chat template by `format_probe.py`, or DEFAULT.

DEFAULT is used without a template, with one that does not support tools, and with one whose calls have no known form.
Then `instruction` describes the format in the conversation.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from neuronpipe.protocol.argument_syntax import ArgumentSyntax, Syntax
from neuronpipe.protocol.frozen import frozen

WILD = "\0"  # stands for any letter or digit
ID_CHARACTERS = 9
NAME_CHARACTERS = re.compile(r"[A-Za-z0-9_.:-]*")
RESULT = "<tool_response>\n{}\n</tool_response>"

Message = dict[str, Any]
"""A message in the form that templates take."""


@frozen
class CallFormat:
    """The text around the names and arguments of calls, as in the message `Calls`, and how a template takes calls.

    parameter_before, parameter_between, parameter_after: the text before, between and after the name and the value of
        an argument, if arguments are written one by one; empty if they are a JSON object
    by_template: True if the template writes tools, calls and results; otherwise they are written as text
    objects: True if the template takes arguments as objects; otherwise as JSON strings
    empty: the content that the template takes for a message that consists of calls
    own_ids: True if the template writes the ids of calls, and accepts only ids of nine letters and digits
    as_text: True if the template writes tools and results, but takes calls as part of the content
    argument_syntax: the syntax of arguments, as in the message `Calls`
    numbered_ids: True if the template writes ids in place of names, as functions.NAME:NUMBER
    """

    before: str
    between: str
    next: str
    after: str
    marker: str
    by_template: bool = False
    objects: bool = True
    empty: str | None = ""
    own_ids: bool = False
    parameter_before: str = ""
    parameter_between: str = ""
    parameter_after: str = ""
    as_text: bool = False
    argument_syntax: ArgumentSyntax = ""
    numbered_ids: bool = False

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Return calls as text.

        calls: names and arguments
        """
        syntax = Syntax.of(self.argument_syntax) if self.argument_syntax else None
        texts = [
            f"{name}{self.between}{arguments if syntax is None else syntax.written(arguments)}"
            for name, arguments in calls
        ]
        return f"{self.before}{self.next.join(texts)}{self.after}"

    def message(self, content: str, calls: Sequence[tuple[str, str, str]], reasoning: str = "") -> Message:
        """Return a message of the assistant in the form that the template takes.

        calls: ids, names and arguments
        """
        if self.as_text:
            written = self.written([(name, arguments) for _, name, arguments in calls])
            content = f"{content}\n{written}" if content else written
            return {"role": "assistant", "content": content, **reasoning_fields(reasoning)}
        return {
            "role": "assistant",
            "content": content or self.empty,
            **reasoning_fields(reasoning),
            "tool_calls": [
                {
                    "id": self.id_of(id_),
                    "type": "function",
                    "function": {"name": name, "arguments": _object(arguments) if self.objects else arguments},
                }
                for id_, name, arguments in calls
            ],
        }

    def id_of(self, id_: str) -> str:
        """Return a call's id in the form that the template accepts; the same id for the same argument."""
        if not self.own_ids or re.fullmatch(rf"[A-Za-z0-9]{{{ID_CHARACTERS}}}", id_):
            return id_
        return hashlib.sha256(id_.encode(errors="replace")).hexdigest()[:ID_CHARACTERS]


DEFAULT = CallFormat(
    before='<tool_call>\n{"name": "',
    between='", "arguments": ',
    next='}\n</tool_call>\n<tool_call>\n{"name": "',
    after="}\n</tool_call>",
    marker="<tool_call>",
)

TEXT_FORMATS: tuple[tuple[tuple[str, ...], CallFormat], ...] = (
    # Granite 3, whose calls are a list
    (
        ("<|tool_call|>", "JSON list"),
        CallFormat(
            before='<|tool_call|>[{"name": "',
            between='", "arguments": ',
            next='}, {"name": "',
            after="}]",
            marker="<|tool_call|>",
            by_template=True,
            as_text=True,
        ),
    ),
    # LFM2
    (
        ("<|tool_list_start|>",),
        CallFormat(
            before="<|tool_call_start|>[",
            between="(",
            next="), ",
            after=")]<|tool_call_end|>",
            marker="<|tool_call_start|>",
            by_template=True,
            as_text=True,
            argument_syntax="python",
        ),
    ),
    # SmolLM3, Hermes, Falcon-H1
    (
        ("<tool_call>", "</tool_call>", "name", "arguments"),
        dataclasses.replace(DEFAULT, by_template=True, as_text=True),
    ),
)
"""Formats of calls that a template asks for in its description of tools, but does not write itself: strings of that
description, and the format."""

ONE_CALL = dataclasses.replace(DEFAULT, next="")
"""For base models, which do not know when to stop calling."""


def numbered_id(name: str, number: int) -> str:
    """Return the id of a call as Kimi K2's templates write it in place of the name.

    number: the number of the call in the conversation, from 0
    """
    return f"functions.{name}:{number}"


def instruction(descriptions: Sequence[dict[str, Any]], form: CallFormat) -> str:
    """Return a text that describes tools and the call format to a model whose template does not.

    form: DEFAULT or ONE_CALL
    """
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in descriptions)
    example = form.written([("NAME", "ARGUMENTS")])
    several = "To call several, write several of these one after the other. " if form.next else ""
    return (
        "You can call functions. Each of these lines describes one, with the JSON schema of its arguments under "
        f'"parameters":\n{functions}\n\n'
        "To call a function, end your answer with its name and a JSON object of its arguments, in this form:\n"
        f"{example}\n"
        f"{several}What is returned comes in the next message, "
        "between <tool_response> and </tool_response>. If you need no function, answer as usual."
    )


def reasoning_fields(reasoning: str) -> Message:
    """Return the fields of a message in which templates look for reasoning; none if it is empty."""
    return dict.fromkeys(("reasoning_content", "thinking"), reasoning) if reasoning else {}


def _object(arguments: str) -> Any:
    """Parse arguments as a JSON object; return them unchanged if they are none, as in a completion that was cut off."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
