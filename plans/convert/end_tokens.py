"""The tokens that end a sequence, and which field or rule names each.

The configuration of a chat model often names only the end of documents, while its template closes turns with another
token. Without that end token, a run would continue with the user's turn. So the tokens of all fields and rules are
used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted

CLOSES = "the chat template closes turns with it"
CHANNEL, MESSAGE_END = "<|channel|>", "<|end|>"
CHANNEL_ENDS = {"<|return|>": "it ends an answer in channels", "<|call|>": "it ends a call in channels"}
"""In OpenAI's harmony format an answer consists of several messages: the end of one of them does not end the answer."""


class EndToken(NamedTuple):
    """A token that ends a sequence.

    text: "" if it is not known
    why: the field that names it, or the rule
    """

    token: int
    text: str
    why: str


def ids_at(record: Record, field: str, vocabulary: int) -> list[int]:
    """Return the token ids in a field, which has one or a non-empty list. Raises UserError for other values."""
    value = record.value(field)
    tokens = value if isinstance(value, list) and value else [value]
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocabulary:
            record.fail(field, f"{quoted(token)} is no token id below {vocabulary}")
    return tokens


def end_tokens(
    declared: Sequence[tuple[int, str]], by_text: Sequence[tuple[str, str]], closing: str, whole: Mapping[str, int]
) -> tuple[EndToken, ...]:
    """Return the tokens that end a sequence, each once, with the first reason for it.

    declared: (id, field that names it)
    by_text: (text of a token, field that names it); ignored if `whole` lacks the text
    closing: text that the chat template writes after an answer; the longest token at its begin ends a sequence
    whole: text -> id of the tokens that are found in a text before it is split
    """
    texts = {token: text for text, token in whole.items()}
    ends = [EndToken(token, texts.get(token, ""), why) for token, why in declared]
    ends += [EndToken(whole[text], text, why) for text, why in by_text if text in whole]
    if closes := [text for text in whole if text and closing.startswith(text)]:
        text = max(closes, key=len)
        ends.append(EndToken(whole[text], text, CLOSES))
    if {CHANNEL, MESSAGE_END, *CHANNEL_ENDS} <= whole.keys():
        ends = [end for end in ends if end.token != whole[MESSAGE_END]]
        ends += [EndToken(whole[text], text, why) for text, why in CHANNEL_ENDS.items()]
    first: dict[int, EndToken] = {}
    for end in ends:
        first.setdefault(end.token, end)
    return tuple(first.values())


def added_tokens(tokenizer: bytes, vocabulary: int) -> dict[str, int]:
    """Return text -> id of the added tokens of a tokenizer.json, without ids that have no embedding.

    tokenizer: content that the library can load
    """
    added = json.loads(tokenizer).get("added_tokens") or []
    return {token["content"]: token["id"] for token in added if token["id"] < vocabulary}
