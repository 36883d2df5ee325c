"""A package's tokenizer: from text to tokens, and from tokens to the text that may be shown now.

The name of a token in tokenizer.json is text, while a token may be half a character: `Spelling` finds its bytes, and
`TextStream` holds back what is not a whole character yet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

from neuronpipe.native import lib
from neuronpipe.plans.package.tokenizer import open_tokenizer, panics_are_errors
from neuronpipe.protocol.frozen import frozen

BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer(Protocol):
    """What is needed of a tokenizer. `tokenizer.json` alone decides about special tokens."""

    @property
    def longest_token_bytes(self) -> int:
        """No token stands for more bytes of text."""
        ...

    def encode(self, text: str, *, frame: bool = True) -> list[int]:
        """Token ids of a text. frame: with the tokens that the file puts round a text."""
        ...

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of token ids. special: with the names of special tokens."""
        ...

    def piece(self, token: int) -> bytes:
        """The bytes of one token, as in `Token`; empty for an id that no token has."""
        ...

    @property
    def special_tokens(self) -> list[int]:
        """Ids of tokens that are no text."""
        ...

    def pieces(self, count: int) -> list[bytes]:
        """The bytes of the first `count` ids. Raises ValueError when names may mean other bytes than `piece` finds."""
        ...


class FileTokenizer:
    """A package's tokenizer.json through the `tokenizers` library."""

    def __init__(self, text: str) -> None:
        self._library = open_tokenizer(text, "tokenizer.json")
        lib.np_memory_give_back()  # reading takes twice what stays
        self._spelling: Spelling | None = None
        names = map(self._library.id_to_token, range(self._library.get_vocab_size()))
        # A token's name has a character for each byte, or more; normalizers may shorten a text a little.
        self._longest_token_bytes = max(16, *(len(name.encode()) for name in names if name))

    @property
    def longest_token_bytes(self) -> int:
        """No token stands for more bytes of text."""
        return self._longest_token_bytes

    def encode(self, text: str, *, frame: bool = True) -> list[int]:
        """Token ids of a text. frame: with the tokens that the file's post-processor puts round a text."""
        with panics_are_errors():
            return list(self._library.encode(text, add_special_tokens=frame).ids)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Text of token ids, with or without the names of special tokens. Bytes that are no UTF-8 become U+FFFD."""
        return str(self._library.decode(list(tokens), skip_special_tokens=not special))

    def piece(self, token: int) -> bytes:
        """The bytes of one token: its name, as the file's decoder spells bytes."""
        if self._spelling is None:
            self._spelling = Spelling.of(self._library)
        name = self._library.id_to_token(token)
        return b"" if name is None else self._spelling.bytes_of(name)

    @property
    def special_tokens(self) -> list[int]:
        """Ids of tokens that are no text."""
        return [token for token, added in self._library.get_added_tokens_decoder().items() if added.special]

    def pieces(self, count: int) -> list[bytes]:
        """The bytes of the first `count` ids. Raises ValueError when names may mean other bytes than `piece` finds."""
        pieces = [self.piece(token) for token in range(count)]
        if self._spelling is None or not self._spelling.every_byte:
            raise ValueError("its decoder is neither ByteLevel nor ByteFallback")
        return pieces


def _bytes_by_character() -> dict[str, int]:
    """The byte-level alphabet: a printable byte is its own character, the others, in order, have U+0100 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


@frozen(kw_only=True)
class Spelling:
    """What the file's decoder says.

    alphabet: the byte of each character of a name, where names are spelled byte by byte
    byte_names: whether <0x0A> is a byte
    replaced: what stands for what in names ("\u2581" for a space)
    plain: names that spell no bytes: those of added tokens; but characters are replaced in them too (Gemma's blanks)
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
        if self.alphabet is not None and name in self.plain:
            return name.encode(errors="replace")
        if self.alphabet is not None and all(character in self.alphabet for character in name):
            return bytes(self.alphabet[character] for character in name)
        if self.byte_names and name not in self.plain and (match := BYTE_NAME.fullmatch(name)):
            return bytes.fromhex(match[1])
        for old, new in self.replaced.items():
            name = name.replace(old, new)
        return name.encode(errors="replace")


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A decoder's steps; most are a sequence of them."""
    yield decoder
    for step in decoder.get("decoders", ()):
        yield from _steps(step)


class TextStream:
    """The text of a growing token list. Holds back incomplete UTF-8 and what may become a stop string.

    Only a short tail of the ids is decoded for each token, so that the work per token does not grow.

    marks: special tokens that are text here, and that text
    """

    TAIL_TOKENS = 16

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str], marks: Mapping[int, str] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._marks = marks or {}
        self._ids = list(prompt[-self.TAIL_TOKENS :])
        self._seen = tokenizer.decode(self._ids)
        self._held = ""
        self.shown = ""  # everything that was given out so far
        self._stop = tuple(s for s in stop if s)
        self.stopped = False

    def push(self, token: int) -> str:
        """Take a token; returns the text that may be shown. Sets `stopped` when a stop string was met."""
        self._ids.append(token)
        self._held += self._marks.get(token, "")
        text = self._tokenizer.decode(self._ids)
        if text.endswith("�"):
            return ""  # a character that is not complete yet
        self._held += text[len(self._seen) :]
        self._seen = text
        if len(self._ids) > 2 * self.TAIL_TOKENS:
            self._ids = self._ids[-self.TAIL_TOKENS :]
            self._seen = self._tokenizer.decode(self._ids)
        return self._release()

    def finish(self) -> str:
        """What was held back, at the end of the text."""
        rest = "" if self.stopped else self._held + self._tokenizer.decode(self._ids)[len(self._seen) :]
        self._held = ""
        self.shown += rest
        return rest

    def _release(self) -> str:
        """Cut the held text at a stop string; keep back its longest end that begins one."""
        for stop in self._stop:
            at = self._held.find(stop)
            if at >= 0:
                self.stopped = True
                self._held = self._held[:at]
        keep = 0
        if not self.stopped:
            ends = (n for s in self._stop for n in range(1, len(s)) if self._held.endswith(s[:n]))
            keep = max(ends, default=0)
        cut = len(self._held) - keep
        out, self._held = self._held[:cut], self._held[cut:]
        self.shown += out
        return out
