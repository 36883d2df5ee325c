"""How a model writes calls of functions: read off its chat template by `format_probe.py`, or stated here.

Where there is no template, or one that knows no tools, or writes calls in a way that is not known, the format is
DEFAULT, and a text that says so in the conversation: see `instruction`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from neuronpipe.protocol.frozen import frozen

WILD = "\0"  # a letter or digit, whichever
ID_CHARACTERS = 9
NAME_CHARACTERS = re.compile(r"[A-Za-z0-9_.:-]*")
RESULT = "<tool_response>\n{}\n</tool_response>"

Message = dict[str, Any]
"""A message as templates know it."""


@frozen
class CallFormat:
    """What stands round the names and arguments of calls, as in the message `Calls`, and how a template takes calls.

    by_template: whether the template writes functions, calls and results; else they are told as texts
    objects: whether it takes arguments as objects; else as their JSON
    empty: what it takes as the content of a message that only calls
    own_ids: whether it writes the ids of calls, and takes only those of nine letters and digits
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

    def written(self, calls: Sequence[tuple[str, str]]) -> str:
        """Calls as text: names and arguments."""
        texts = [f"{name}{self.between}{arguments}" for name, arguments in calls]
        return f"{self.before}{self.next.join(texts)}{self.after}"

    def message(self, content: str, calls: Sequence[tuple[str, str, str]]) -> Message:
        """A message of the assistant's as the template takes it. calls: ids, names and arguments."""
        return {
            "role": "assistant",
            "content": content or self.empty,
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
        """A call's id as the template takes it: always the same for the same."""
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

ONE_CALL = dataclasses.replace(DEFAULT, next="")
"""For base models: they do not know when they have called enough."""


def instruction(descriptions: Sequence[dict[str, Any]], form: CallFormat) -> str:
    """What a model is told of functions that its template does not tell it. form: DEFAULT or ONE_CALL."""
    functions = "\n".join(json.dumps(one["function"], ensure_ascii=False) for one in descriptions)
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


def _object(arguments: str) -> Any:
    """Arguments as an object; as they are where they are none: an answer may have been cut off."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
