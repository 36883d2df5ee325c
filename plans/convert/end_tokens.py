"""The tokens that end a sequence, and which field or rule names each.

A chat model's configuration often names only the end of documents, while its template closes each turn with another
token. A run that does not stop there would go on and write the user's turn. So every token that any source names is
used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import quoted

CLOSES = "the chat template closes turns with it"


class EndToken(NamedTuple):
    """A token that ends a sequence.

    why: the field that names it, or what the template does
    """

    token: int
    text: str
    why: str


def ids_at(record: Record, field: str, vocabulary: int) -> list[int]:
    """Read one token id or a non-empty list of them. Raises UserError naming the field."""
    value = record.value(field)
    tokens = value if isinstance(value, list) and value else [value]
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocabulary:
            record.fail(field, f"{quoted(token)} is no token id below {vocabulary}")
    return tokens


def end_tokens(
    declared: Sequence[tuple[int, str]], by_text: Sequence[tuple[str, str]], closing: str, whole: Mapping[str, int]
) -> tuple[EndToken, ...]:
    """Gather the tokens that end a sequence, each once, with the first reason for it.

    declared: ids, and the fields that name them
    by_text: texts of tokens, and the fields that name them; a text that is no whole token ends nothing
    closing: what the chat template writes after an answer
    whole: ids of tokens that are found in a text before it is split, by their texts
    """
    texts = {token: text for text, token in whole.items()}
    ends = [EndToken(token, texts.get(token, ""), why) for token, why in declared]
    ends += [EndToken(whole[text], text, why) for text, why in by_text if text in whole]
    if closes := [text for text in whole if text and closing.startswith(text)]:
        text = max(closes, key=len)
        ends.append(EndToken(whole[text], text, CLOSES))
    first: dict[int, EndToken] = {}
    for end in ends:
        first.setdefault(end.token, end)
    return tuple(first.values())


def added_tokens(tokenizer: bytes, vocabulary: int) -> dict[str, int]:
    """Return ids of the added tokens of a tokenizer.json by their texts.

    tokenizer: a file that the library can load
    """
    added = json.loads(tokenizer).get("added_tokens") or []
    return {token["content"]: token["id"] for token in added if token["id"] < vocabulary}
