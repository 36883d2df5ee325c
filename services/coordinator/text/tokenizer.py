"""A package's tokenizer: encoding, decoding, and incremental detokenization.

A token may be half a character, but its name in tokenizer.json is text: `Spelling` finds the token's bytes, and
`TextStream` holds incomplete characters back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, Self

from neuronpipe.native import lib
from neuronpipe.plans.package.byte_pair_tokens import BytePairTokens
from neuronpipe.plans.package.text_blocks import bytes_by_character
from neuronpipe.plans.package.tokenizer import open_tokenizer, panics_are_errors
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

BYTE_NAME = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer(Protocol):
    """The interface of a tokenizer. `tokenizer.json` alone determines which tokens are special."""

    @property
    def longest_token_bytes(self) -> int:
        """Upper bound for the number of bytes of text that become one token."""
        ...

    def encode(self, text: str, *, frame: bool = True) -> list[int]:
        """Return the token ids of a text.

        frame: include the tokens that the file adds around a text
        """
        ...

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """Return the text of token ids.

        special: include the names of special tokens
        """
        ...

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token, as in `Token`; empty for an id without a token."""
        ...

    @property
    def special_tokens(self) -> list[int]:
        """Ids of tokens that are not text."""
        ...

    def pieces(self, count: int) -> list[bytes]:
        """Return the bytes of the first `count` ids. Raises ValueError if `piece` may not know all bytes."""
        ...


class LibraryTokens:
    """The tokens of any tokenizer.json, all of it read by the `tokenizers` library."""

    def __init__(self, content: bytes) -> None:
        self._library = open_tokenizer(content, "tokenizer.json")
        self.decoder = self._library.decoder
        self.added: Mapping[int, Any] = self._library.get_added_tokens_decoder()

    @property
    def ids(self) -> int:
        """One more than the largest id."""
        return max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def longest_name_bytes(self) -> int:
        names = map(self._library.id_to_token, range(self._library.get_vocab_size()))
        return max((len(name.encode()) for name in names if name), default=0)

    def name(self, token: int) -> str | None:
        return None if (name := self._library.id_to_token(token)) is None else str(name)

    def decode(self, tokens: Sequence[int], *, special: bool) -> str:
        return str(self._library.decode(list(tokens), skip_special_tokens=not special))

    def encode(self, text: str, *, frame: bool) -> list[int]:
        with panics_are_errors():
            return list(self._library.encode(text, add_special_tokens=frame).ids)


class FileTokenizer:
    """A package's tokenizer.json. Only a byte-pair encoding is read in little memory."""

    def __init__(self, content: bytes, *, must_be_compact: bool = False) -> None:
        """must_be_compact: the memory of the run counts on little memory. Raises UserError if it takes more."""
        compact = BytePairTokens.open(content)
        if must_be_compact and compact is None:
            raise UserError("tokenizer.json: `compact_tokenizer` of manifest.json is wrong; convert the model again")
        self.tokens: BytePairTokens | LibraryTokens = compact or LibraryTokens(content)
        lib.np_memory_give_back()  # reading takes more memory than what stays
        # A token's name has at least a character for each byte; normalizers may shorten a text a little.
        self._longest_token_bytes = max(16, self.tokens.longest_name_bytes)

    @property
    def longest_token_bytes(self) -> int:
        return self._longest_token_bytes

    def encode(self, text: str, *, frame: bool = True) -> list[int]:
        return self.tokens.encode(text, frame=frame)

    def decode(self, tokens: Sequence[int], *, special: bool = False) -> str:
        """See `Tokenizer`. Invalid UTF-8 becomes U+FFFD."""
        return self.tokens.decode(tokens, special=special)

    def piece(self, token: int) -> bytes:
        name = self.tokens.name(token)
        return b"" if name is None else self._spelling.bytes_of(name)

    @property
    def special_tokens(self) -> list[int]:
        return [token for token, added in self.tokens.added.items() if added.special]

    def pieces(self, count: int) -> list[bytes]:
        if not self._spelling.every_byte:
            raise ValueError("its decoder is neither ByteLevel nor ByteFallback")
        return [self.piece(token) for token in range(count)]

    @cached_property
    def _spelling(self) -> Spelling:
        return Spelling.of(self.tokens.decoder, self.tokens.added)


@frozen(kw_only=True)
class Spelling:
    """The rules by which the file's decoder turns names into bytes.

    alphabet: the byte of each character of a name, if names are spelled byte by byte
    byte_names: True if a name like <0x0A> means a byte
    replaced: replacements in names, such as "\u2581" by a space
    plain: names of added tokens, which spell no bytes; `replaced` may apply to them (Gemma's blanks)
    """

    alphabet: Mapping[str, int] | None
    byte_names: bool
    replaced: Mapping[str, str]
    plain: frozenset[str]

    @classmethod
    def of(cls, decoder: Any, added: Mapping[int, Any]) -> Self:
        """Return the rules of the library's decoder, or of none.

        added: the added tokens by their ids
        """
        steps = list(_steps(json.loads(decoder.__getstate__()))) if decoder is not None else []
        kinds = {step.get("type") for step in steps}
        replaced = {}
        for step in steps:
            if step.get("type") == "Metaspace":
                replaced[step["replacement"]] = " "
            elif step.get("type") == "Replace" and "String" in step["pattern"]:
                replaced[step["pattern"]["String"]] = step["content"]
        return cls(
            alphabet=bytes_by_character() if "ByteLevel" in kinds else None,
            byte_names="ByteFallback" in kinds,
            replaced=replaced,
            plain=frozenset(token.content for token in added.values()),
        )

    @property
    def every_byte(self) -> bool:
        """True if the rules are known by which names spell all bytes; otherwise `bytes_of` may be wrong."""
        return self.alphabet is not None or self.byte_names

    def bytes_of(self, name: str) -> bytes:
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
    """Yield a decoder's steps; most decoders are sequences."""
    yield decoder
    for step in decoder.get("decoders", ()):
        yield from _steps(step)


class TextStream:
    """Incremental detokenization. It holds back incomplete UTF-8 and what may become a stop string.

    For each token only the last ids are decoded, so that the work per token does not grow.

    marks: the text of each special token that counts as text
    shown: all text released so far
    matched_stop: the stop string at which the text ends, once there is one
    """

    TAIL_TOKENS = 16

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str], marks: Mapping[int, str] | None = None
    ) -> None:
        self._tokenizer = tokenizer
        self._marks = marks or {}
        self._ids = list(prompt[-self.TAIL_TOKENS :])
        self._decoded = tokenizer.decode(self._ids)
        self._pending = ""
        self.shown = ""
        self._stop = tuple(s for s in stop if s)
        self.matched_stop: str | None = None

    @property
    def stopped(self) -> bool:
        return self.matched_stop is not None

    def push(self, token: int) -> str:
        """Add a token; return the text that it releases."""
        self._ids.append(token)
        self._pending += self._marks.get(token, "")
        text = self._tokenizer.decode(self._ids)
        if text.endswith("�"):
            return ""  # an incomplete character
        self._pending += text[len(self._decoded) :]
        self._decoded = text
        if len(self._ids) > 2 * self.TAIL_TOKENS:
            self._ids = self._ids[-self.TAIL_TOKENS :]
            self._decoded = self._tokenizer.decode(self._ids)
        return self._release()

    def finish(self) -> str:
        """Return the text that was held back, at the end of the sequence."""
        remainder = "" if self.stopped else self._pending + self._tokenizer.decode(self._ids)[len(self._decoded) :]
        self._pending = ""
        self.shown += remainder
        return remainder

    def _release(self) -> str:
        """Release the pending text up to a stop string, or without the longest end that may begin a stop string."""
        for stop in self._stop:
            at = self._pending.find(stop)
            if at >= 0:
                self.matched_stop = stop  # one found later in this loop begins earlier
                self._pending = self._pending[:at]
        keep = 0
        if not self.stopped:
            ends = (n for s in self._stop for n in range(1, len(s)) if self._pending.endswith(s[:n]))
            keep = max(ends, default=0)
        cut = len(self._pending) - keep
        text, self._pending = self._pending[:cut], self._pending[cut:]
        self.shown += text
        return text
