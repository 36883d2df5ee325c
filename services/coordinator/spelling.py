"""How the names of tokens spell bytes: a name in tokenizer.json is text, while a token may be half a character."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Self

BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _bytes_by_character() -> dict[str, int]:
    """The byte-level alphabet: a printable byte is its own character, the others, in order, have U+0100 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spelling:
    """What the file's decoder says.

    alphabet: the byte of each character of a name, where names are spelled byte by byte
    byte_names: whether <0x0A> is a byte
    replaced: what stands for what in names ("\u2581" for a space)
    plain: names that are no spelling: those of added tokens
    """

    alphabet: Mapping[str, int] | None
    byte_names: bool
    replaced: Mapping[str, str]
    plain: frozenset[str]

    @classmethod
    def of(cls, library: Any) -> Self:
        """The spelling of a `tokenizers.Tokenizer`."""
        decoder = library.decoder
        steps = list(_steps(json.loads(decoder.__getstate__()))) if decoder is not None else []
        kinds = {step.get("type") for step in steps}
        replaced = {}
        for step in steps:
            if step.get("type") == "Metaspace":
                replaced[step["replacement"]] = " "
            elif step.get("type") == "Replace" and "String" in step["pattern"]:
                replaced[step["pattern"]["String"]] = step["content"]
        return cls(
            alphabet=_bytes_by_character() if "ByteLevel" in kinds else None,
            byte_names="ByteFallback" in kinds,
            replaced=replaced,
            plain=frozenset(token.content for token in library.get_added_tokens_decoder().values()),
        )

    @property
    def every_byte(self) -> bool:
        """Whether names can spell any byte: then nothing else than what is known here turns them into text."""
        return self.alphabet is not None or self.byte_names

    def bytes_of(self, name: str) -> bytes:
        """The bytes of the token of this name."""
        if name in self.plain:
            return name.encode(errors="replace")
        if self.alphabet is not None and all(character in self.alphabet for character in name):
            return bytes(self.alphabet[character] for character in name)
        if self.byte_names and (match := BYTE_NAME.fullmatch(name)):
            return bytes.fromhex(match[1])
        for old, new in self.replaced.items():
            name = name.replace(old, new)
        return name.encode(errors="replace")


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A decoder's steps; most are a sequence of them."""
    yield decoder
    for step in decoder.get("decoders", ()):
        yield from _steps(step)
