"""Answers that follow grammars, on the coordinator's side. A helper process compiles and computes masks.

    state of an answer          until                          the scheduler
    pending, being compiled     the first mask or a refusal    has not accepted the request yet
    pending, after a token      the next mask                  computes the token, and samples none after it
    not pending                 its next token is sampled      samples its row

Masks after tokens come before compilations, of which one is under way at a time. A request whose compilation has waited
for WAITING_S is refused, so that expensive grammars form no long queue. When the helper process dies, its answers are
followed again from their grammars and tokens.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterable
from typing import Protocol, Self

from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.memory_budget import vocabulary_bytes
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.messages.client import RefusalCode
from neuronpipe.protocol.messages.request import Generate
from neuronpipe.services.coordinator.text.grammar import Grammars
from neuronpipe.services.coordinator.text.grammar_process import (
    COMPLETE,
    REFUSED,
    UNKNOWN,
    Source,
    packed_beginning,
    packed_continuation,
    preparing,
)
from neuronpipe.services.coordinator.text.tokenizer import Tokenizer
from neuronpipe.services.untrusted.helper import Helper, Outcome, UntrustedError

WITHIN_S = 2.0
WAITING_S = 10.0
PATIENCE_S = 0.002  # for which a finished step waits for masks; then the rows without a mask are discarded
REPLAYED_TOKENS_PER_S = 2000

log = logging.getLogger(__name__)


@frozen
class Failure:
    """The code and the message of the `Refused` that ends an answer which cannot be followed."""

    code: RefusalCode
    message: str


class Answer(Protocol):
    """The state of an answer in its grammar.

    pending: True while the mask is not known
    allowed: the mask: one bit for each token id, 1 if it may come next, the lowest bit of a byte first
    complete: True if nothing can follow
    failure: the reason why the answer cannot continue; None: it can
    """

    pending: bool
    allowed: bytes
    complete: bool
    failure: Failure | None

    def take(self, token: int) -> None:
        """Continue with an allowed token. The answer is pending afterwards."""
        ...

    def close(self) -> None:
        """Stop following the answer: its request has ended."""
        ...


class Constraints(Protocol):
    """The interface that starts answers with a grammar or calls.

    needs_memory: True while answers are followed or a process has memory for them; it must be reserved
    """

    @property
    def needs_memory(self) -> bool: ...

    def set_memory(self, is_reserved: bool) -> None:
        """Note whether memory is reserved. Nothing is compiled before."""
        ...

    def start(self, ask: Generate) -> Answer:
        """Start the answer to a request with a grammar or calls. It may be pending."""
        ...

    def marks(self, ask: Generate) -> dict[int, str]:
        """Return the text of each special token that counts as text in the answer to a request."""
        ...


class ConstrainedAnswer:
    """An `Answer` in the helper process."""

    def __init__(self, owner: ConstrainedAnswers, number: int, source: Source) -> None:
        self._owner = owner
        self.number, self.source = number, source
        self.tokens: list[int] = []
        self.arrived_s = time.monotonic()
        self.attempts = 0  # failed attempts at the current mask
        self.pending = True
        self.allowed = b""
        self.complete = False
        self.failure: Failure | None = None
        self.closed = False

    def take(self, token: int) -> None:
        self.tokens.append(token)
        self.pending = True
        self._owner.ask_next(self)

    def close(self) -> None:
        self.closed = True
        self._owner.followed.discard(self)

    def settle(self, failure: Failure | None = None) -> None:
        self.pending, self.failure, self.attempts = False, failure, 0
        self._owner.settled = True
        if failure is not None:
            self._owner.followed.discard(self)


class ConstrainedAnswers:
    """`Constraints` by a helper process, which starts with the first request.

    memory_bytes: limit of the memory of all grammars
    vocabulary_bytes: memory of the vocabulary, in addition
    descriptor, due_s: when to call `receive`, as in `Helper`
    """

    def __init__(self, grammars: Grammars, memory_bytes: int, vocabulary_bytes: int = 0) -> None:
        self._grammars = grammars
        work = preparing(grammars, memory_bytes // 2)
        self._helper = Helper(work, memory_bytes=memory_bytes, setup_bytes=vocabulary_bytes)
        self._numbers = 0
        self.settled = False  # True if an answer has arrived since the last `receive`
        self._served = 0  # number of answers of the current process
        self._submitted: dict[int, ConstrainedAnswer] = {}  # by job
        self._to_continue: list[ConstrainedAnswer] = []  # not submitted yet: see `submit`
        self._to_open: deque[ConstrainedAnswer] = deque()
        self._has_memory = False
        self.followed: set[ConstrainedAnswer] = set()  # neither closed nor refused
        self.descriptor = self._helper.descriptor

    @classmethod
    def of(cls, manifest: Manifest, tokenizer: Tokenizer, end_tokens: Iterable[int], memory_bytes: int) -> Self:
        grammars = Grammars(tokenizer, manifest.model.vocabulary, end_tokens)
        return cls(grammars, memory_bytes, vocabulary_bytes(manifest))

    @property
    def due_s(self) -> float:
        """Seconds until `receive` must be called; infinity while no answer is outstanding."""
        if self.settled:
            return 0.0
        due_s = self._helper.due_s
        return math.inf if due_s is None else due_s

    @property
    def pid(self) -> int | None:
        return self._helper.pid

    @property
    def needs_memory(self) -> bool:
        return bool(self.followed) or self.pid is not None

    def set_memory(self, is_reserved: bool) -> None:
        self._has_memory = is_reserved
        self._open_next()

    def marks(self, ask: Generate) -> dict[int, str]:
        return self._grammars.marks(ask.calls, ask.shown_tokens)

    def start(self, ask: Generate) -> ConstrainedAnswer:
        self._numbers += 1
        answer = ConstrainedAnswer(self, self._numbers, Source(ask.calls, ask.grammar, ask.grammar_syntax))
        self._to_open.append(answer)
        self.followed.add(answer)
        self._open_next()
        return answer

    def ask_next(self, answer: ConstrainedAnswer) -> None:
        """Request the mask after the last token, with the next `submit`."""
        self._to_continue.append(answer)

    def submit(self) -> None:
        """Send the helper process the tokens that answers have taken.

        `take` does not send them, so that the workers of the next step wake before the helper process does: a wake-up
        costs as much as the mask.
        """
        for answer in self._to_continue:
            request = packed_continuation(answer.number, len(answer.tokens) - 1, answer.tokens[-1])
            self._submit(answer, request, WITHIN_S)
        self._to_continue.clear()

    def receive(self) -> bool:
        """Process the results of the helper process. Returns True if any answer is no longer pending."""
        self.submit()
        for outcome in self._helper.receive():
            self._take(outcome)
        self._open_next()
        settled, self.settled = self.settled, False
        return settled

    def wait(self, answers: Iterable[Answer], timeout_s: float = PATIENCE_S) -> None:
        """Wait until none of these answers is pending, at most for the timeout. The caller must then look at all
        answers, since the next `receive` does not report those that have arrived."""
        self.submit()
        deadline, answers = time.monotonic() + timeout_s, list(answers)
        while any(answer.pending for answer in answers) and (left_s := deadline - time.monotonic()) > 0:
            for outcome in self._helper.wait(left_s):
                self._take(outcome)
            self._open_next()
        self.settled = False

    def close(self) -> None:
        self._helper.dispose()

    def _open_next(self) -> None:
        """Submit a compilation if nothing is under way, so that a mask waits for at most one compilation."""
        while self._has_memory and self._to_open and not self._submitted and not self._to_continue:
            answer = self._to_open.popleft()
            if answer.closed:
                continue
            begins = not answer.tokens and not answer.attempts
            if begins and time.monotonic() - answer.arrived_s > WAITING_S:
                message = "grammar: those of other requests take long to compile; try again"
                answer.settle(Failure("starting", message))
            else:
                timeout_s = WITHIN_S + len(answer.tokens) / REPLAYED_TOKENS_PER_S
                self._submit(answer, packed_beginning(answer.number, answer.source, answer.tokens), timeout_s)

    def _submit(self, answer: ConstrainedAnswer, request: bytes, timeout_s: float) -> None:
        try:
            self._submitted[self._helper.submit(request, timeout_s)] = answer
        except UntrustedError as error:
            answer.settle(Failure("failed", f"grammar: {error}"))

    def _take(self, outcome: Outcome) -> None:
        answer = self._submitted.pop(outcome.job)
        if answer.closed:
            return
        if outcome.error is not None:
            self._failed(answer, outcome.error)
            return
        self._served += 1
        kind, content = outcome.answer[0], outcome.answer[1:]
        if kind == UNKNOWN:
            self._to_open.appendleft(answer)
        elif kind == REFUSED:
            answer.settle(Failure("bad_request", f"grammar: {content.decode(errors='replace')}"))
        else:
            answer.allowed, answer.complete = content, kind == COMPLETE
            answer.settle()

    def _failed(self, answer: ConstrainedAnswer, error: UntrustedError) -> None:
        """Handle the death of the process, or a failure of the library, at a request of this answer."""
        served, self._served = self._served, 0
        if error.reason in ("memory", "died") and served and not answer.attempts:
            answer.attempts = 1  # the memory of others may have been the reason: try once more, alone
            self._to_open.appendleft(answer)
        elif error.reason in ("failed", "unavailable"):
            log.error("the grammar library failed: %s", error)
            answer.settle(Failure("failed", "grammar: the grammar library has failed at it; see the coordinator's log"))
        else:
            answer.settle(Failure("bad_request", f"grammar: {error}"))
