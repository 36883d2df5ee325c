"""What answers must follow, decided at once in this process: for tests of decisions, without a helper process."""

from __future__ import annotations

from neuronpipe.protocol.messages.request import Generate
from neuronpipe.services.coordinator.text.constrained_answers import Failure
from neuronpipe.services.coordinator.text.grammar import Grammar, GrammarError, Grammars


class DirectAnswer:
    """An `Answer` that is never pending."""

    def __init__(self, grammars: Grammars, ask: Generate) -> None:
        self.pending = self.complete = False
        self.allowed = b""
        self.failure: Failure | None = None
        try:
            if ask.calls is not None:
                self._grammar: Grammar = grammars.start_calls(ask.calls, ask.grammar, ask.grammar_syntax)
            else:
                assert ask.grammar is not None
                self._grammar = grammars.start(ask.grammar, ask.grammar_syntax)
            self.allowed = self._grammar.allowed
        except GrammarError as error:
            self.failure = Failure("bad_request", f"grammar: {error}")

    def take(self, token: int) -> None:
        """As in `Answer`."""
        try:
            self.complete = self._grammar.take(token)
            self.allowed = self._grammar.allowed
        except GrammarError as error:
            self.failure = Failure("bad_request", f"grammar: {error}")

    def close(self) -> None:
        """Nothing is kept."""


class DirectConstraints:
    """`Constraints` by the library, in this process."""

    needs_memory = False

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def set_memory(self, is_reserved: bool) -> None:
        """Nothing is reserved for it."""

    def start(self, ask: Generate) -> DirectAnswer:
        """As in `Constraints`."""
        return DirectAnswer(self._grammars, ask)

    def marks(self, ask: Generate) -> dict[int, str]:
        """As in `Constraints`."""
        return self._grammars.marks(ask.calls, ask.shown_tokens)
