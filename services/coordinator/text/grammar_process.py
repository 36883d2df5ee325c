"""The helper process that compiles grammars and follows answers through them: requests and answers as bytes.

    request     a pickled `Request`, from the service that forked this
    answer      a byte, TAKEN, COMPLETE, REFUSED or UNKNOWN; then what may follow, or the reason

A request has a source, or its tokens continue the answer of that number, which had `position` tokens. An answer that
is not known here, or had another number of tokens, is UNKNOWN: the service then sends its source and all its tokens.
What was compiled is shared, and forgotten when memory runs short.
"""

from __future__ import annotations

import contextlib
import pickle
from collections import OrderedDict
from typing import NamedTuple

from neuronpipe.native import lib
from neuronpipe.protocol.messages.request import Calls, GrammarSyntax
from neuronpipe.protocol.process_facts import private_writable_bytes
from neuronpipe.services.coordinator.text.grammar import Grammar, GrammarError, Grammars
from neuronpipe.services.untrusted.process import Prepare, Work

TAKEN, COMPLETE, REFUSED, UNKNOWN = range(4)
MAX_FOLLOWED = 64


class Source(NamedTuple):
    """What an answer follows: as in `Generate`."""

    calls: Calls | None
    grammar: str | None
    syntax: GrammarSyntax

    def start(self, grammars: Grammars) -> Grammar:
        """The beginning of an answer. Raises GrammarError."""
        if self.calls is not None:
            return grammars.start_calls(self.calls, self.grammar, self.syntax)
        assert self.grammar is not None
        return grammars.start(self.grammar, self.syntax)


class Request(NamedTuple):
    """See the module."""

    number: int
    source: Source | None
    tokens: list[int]
    position: int


def preparing(grammars: Grammars, spare_bytes: int) -> Prepare:
    """The work of a fork of the coordinator. spare_bytes: by how much its private memory may have grown when a grammar
    is compiled; beyond, it forgets the others first."""

    def prepare(_: bytes) -> Work:
        with contextlib.suppress(GrammarError):  # each request is told
            grammars.read_vocabulary()
        lib.np_memory_give_back()
        return _Work(grammars, spare_bytes).answer

    return prepare


class _Work:
    def __init__(self, grammars: Grammars, spare_bytes: int) -> None:
        self._grammars = grammars
        self._followed: OrderedDict[int, tuple[Grammar, int]] = OrderedDict()  # and how many tokens each has taken
        self._limit_bytes = private_writable_bytes() + spare_bytes

    def answer(self, packed: bytes) -> bytes:
        request: Request = pickle.loads(packed)
        number, source, tokens, position = request
        try:
            if source is not None:
                return self._open(number, source, tokens)
            return self._go_on(number, tokens, position)
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
        grammar, taken = self._followed.get(number, (None, -1))
        if grammar is None or taken != position:
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
        return bytes([COMPLETE if complete else TAKEN]) + grammar.allowed
