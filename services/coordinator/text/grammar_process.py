"""The helper process that compiles grammars and follows answers through them. Requests and answers are bytes.

    request     `packed_beginning` or `packed_continuation`, from the service that forked this process
    answer      a byte, FOLLOWED, COMPLETE, REFUSED or UNKNOWN; then the mask, the reason, or nothing

UNKNOWN means that this process does not follow the answer, or has it with another number of tokens: the service then
sends the answer's source and all its tokens. Sequences share compiled grammars, which are dropped when memory runs
short.
"""

from __future__ import annotations

import contextlib
import pickle
import struct
from collections import OrderedDict
from typing import NamedTuple

from neuronpipe.native import lib
from neuronpipe.protocol.messages.request import Calls, GrammarSyntax
from neuronpipe.protocol.process_facts import private_writable_bytes
from neuronpipe.services.coordinator.text.grammar import Grammar, GrammarError, Grammars
from neuronpipe.services.untrusted.process import Prepare, Work

FOLLOWED, COMPLETE, REFUSED, UNKNOWN = range(4)
MAX_FOLLOWED = 64
_BEGINNING = b"b"
_CONTINUATION = struct.Struct("<cQQI")


class Source(NamedTuple):
    """The fields of `Generate` that determine which grammar or calls an answer follows."""

    calls: Calls | None
    grammar: str | None
    syntax: GrammarSyntax

    def start(self, grammars: Grammars) -> Grammar:
        """Return the state before the first token. Raises GrammarError."""
        if self.calls is not None:
            return grammars.start_calls(self.calls, self.grammar, self.syntax)
        assert self.grammar is not None
        return grammars.start(self.grammar, self.syntax)


def packed_beginning(number: int, source: Source, tokens: list[int]) -> bytes:
    """Return the request to follow an answer from its start through these tokens."""
    return _BEGINNING + pickle.dumps((number, source, tokens))


def packed_continuation(number: int, position: int, token: int) -> bytes:
    """Return the request to continue an answer that has `position` tokens with this token."""
    return _CONTINUATION.pack(b"c", number, position, token)


def preparing(grammars: Grammars, spare_bytes: int) -> Prepare:
    """Return the preparation of the helper process.

    spare_bytes: growth of private memory beyond which all grammars are dropped before the next one is compiled
    """

    def prepare(_: bytes) -> Work:
        with contextlib.suppress(GrammarError):  # every request reports it
            grammars.read_vocabulary()
        lib.np_memory_give_back()
        return _Work(grammars, spare_bytes).answer

    return prepare


class _Work:
    def __init__(self, grammars: Grammars, spare_bytes: int) -> None:
        self._grammars = grammars
        self._followed: OrderedDict[int, tuple[Grammar, int]] = OrderedDict()  # with the number of tokens so far
        self._limit_bytes = private_writable_bytes() + spare_bytes

    def answer(self, packed: bytes) -> bytes:
        number = 0
        try:
            if packed.startswith(_BEGINNING):
                number, source, tokens = pickle.loads(packed[len(_BEGINNING) :])
                return self._open(number, source, tokens)
            _, number, position, token = _CONTINUATION.unpack(packed)
            return self._go_on(number, [token], position)
        except GrammarError as error:
            self._followed.pop(number, None)
            return bytes([REFUSED]) + str(error).encode(errors="replace")

    def _open(self, number: int, source: Source, tokens: list[int]) -> bytes:
        self._followed.pop(number, None)
        if private_writable_bytes() > self._limit_bytes:
            self._followed.clear()
            self._grammars.forget()
            lib.np_memory_give_back()
        return self._take(number, source.start(self._grammars), tokens, 0)

    def _go_on(self, number: int, tokens: list[int], position: int) -> bytes:
        grammar, followed_tokens = self._followed.get(number, (None, -1))
        if grammar is None or followed_tokens != position:
            return bytes([UNKNOWN])
        return self._take(number, grammar, tokens, position)

    def _take(self, number: int, grammar: Grammar, tokens: list[int], position: int) -> bytes:
        complete = False
        for token in tokens:
            complete = grammar.take(token)
        self._followed[number] = grammar, position + len(tokens)
        self._followed.move_to_end(number)
        while len(self._followed) > MAX_FOLLOWED:
            self._followed.popitem(last=False)
        return bytes([COMPLETE if complete else FOLLOWED]) + grammar.allowed
