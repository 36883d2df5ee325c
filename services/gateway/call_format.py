"""How a model writes calls of functions: found by looking at what its chat template makes of one, or stated here.

A template that knows tools is given a conversation in which a function with a strange name was called with strange
arguments; where these two stand in what it writes, and what stands round them, is the format. So no list of models is
needed, and what is asked of a model is what it was trained on. Templates differ as well in what they take: arguments
as an object or as text, the content of a message that only calls as nothing or as an empty text. What works is kept.

Where there is no template, or one that knows no tools, or writes calls in no such way, the format is DEFAULT, and a
text that says so in the conversation: see `instruction`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from neuronpipe.protocol.frozen import frozen
from neuronpipe.services.gateway.templates import Refused, Template, TemplateError

WILD = "\0"  # a letter or digit, whichever
ID_CHARACTERS = 9
MIN_MARKER_CHARACTERS = 4  # what is shorter occurs in text
NAME_CHARACTERS = re.compile(r"[A-Za-z0-9_.:-]*")
RESULT = "<tool_response>\n{}\n</tool_response>"

Message = dict[str, Any]
"""A message as templates know it."""

_END = re.compile(r"<\|[^<>|]+\|>\s*\Z")
_TAG = re.compile(r"<[^<>{}\s]+>|\[[A-Z_]+\]")
_NAMES = ("qzx_first", "qzx_second", "qzx_third")
_IDS = ("qzxid0001", "qzxid0002", "qzxid0003")
_TEXT = "qzx text"
_TOOL = "qzx_offered"
_ARGUMENTS = {"qzx": 7}
_WRITTEN = re.compile(r'\{\s*"qzx"\s*:\s*7\s*\}')


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


def format_of(template: Template) -> CallFormat:
    """How this template's model writes calls; DEFAULT where it does not say."""
    if _TOOL not in _rendered(template, []):
        return DEFAULT
    for objects in (True, False):
        for empty in ("", None):
            found = _found(template, CallFormat("", "", "", "", "", by_template=True, objects=objects, empty=empty))
            if found is not None:
                return found
    return DEFAULT


def _found(template: Template, way: CallFormat) -> CallFormat | None:
    """What the template writes when it is given calls in this way; None when that is no format that is known here."""
    said = _rendered(template, [{"role": "assistant", "content": _TEXT}])
    one, two, three = (_rendered(template, [_calling(way, count)]) for count in (1, 2, 3))
    end = said.partition(_TEXT)[2]
    if _END.fullmatch(end) and (own := _END.search(one)):
        end = own[0]  # calls may end with another end token than texts
    if _TEXT not in said or not one.endswith(end):
        return None
    begin = next((at for at, (a, b) in enumerate(zip(said, one, strict=False)) if a != b), min(len(said), len(one)))

    def body(text: str) -> str:
        return text[begin : len(text) - len(end)]

    name_at, arguments = one.find(_NAMES[0], begin), _WRITTEN.search(one, begin)
    if name_at < 0 or arguments is None or arguments.start() < name_at:
        return None
    before, between = one[begin:name_at].lstrip(), one[name_at + len(_NAMES[0]) : arguments.start()]
    after = body(one)[arguments.end() - begin :]
    if not before or not between or NAME_CHARACTERS.match(between).end() or "{" in between:  # type: ignore[union-attr]
        return None
    written = arguments[0]
    next_ = ""
    if two.endswith(end) and two.startswith(one[: arguments.end()]) and _NAMES[1] in two:
        next_ = two[arguments.end() : two.index(_NAMES[1])]
    texts = [_without_ids(text) for text in (before, between, next_, after)]
    tag = _TAG.match(before)
    marker = tag[0] if tag else "" if before[0] in "{[" else before
    if 0 < len(marker) < MIN_MARKER_CHARACTERS:
        return None
    made = dataclasses.replace(
        way, before=texts[0], between=texts[1], next=texts[2], after=texts[3], marker=marker, own_ids=_IDS[0] in one
    )
    for count, text in ((2, two), (3, three)):
        as_expected = made.written([(name, written) for name in _NAMES[:count]])
        if _without_ids(body(text)).lstrip() != as_expected:
            made = dataclasses.replace(made, next="")
    return made if _without_ids(body(one)).lstrip() == made.written([(_NAMES[0], written)]) else None


def _calling(way: CallFormat, count: int) -> Message:
    calls = list(zip(_IDS[:count], _NAMES[:count], [json.dumps(_ARGUMENTS)] * count, strict=True))
    return way.message("", calls)


def _rendered(template: Template, more: list[Message]) -> str:
    """What the template makes of a question and more, with a function; nothing where it does not take that."""
    tool = {"name": _TOOL, "description": "", "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": tool}]
    try:
        return template.render([{"role": "user", "content": "Hi"}, *more], tools=tools, answer=not more)
    except (Refused, TemplateError):
        return ""


def _without_ids(text: str) -> str:
    for id_ in _IDS:
        text = text.replace(id_, WILD * len(id_))
    return text


def _object(arguments: str) -> Any:
    """Arguments as an object; as they are where they are none: an answer may have been cut off."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
