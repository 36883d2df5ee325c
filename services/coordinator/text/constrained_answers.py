"""Answers that follow grammars, from the coordinator's side: a helper process compiles, and says what may follow.

    an answer is              until                                    what the scheduler does
    pending (compiling)       the first mask is there, or a refusal    the request is not accepted yet
    pending (a token taken)   the next mask is there                   its text is in no step, its token is not told yet
    known                     its next token is sampled                it takes part in steps

Tokens go before compilations, of which one is under way at a time. One that has waited for WAITING_S is refused, so
that grammars which take as long as they may form no long queue. What a helper process knew of answers is lost with
it; each is followed again from its source and tokens.
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
from neuronpipe.protocol.messages.request import Calls, Generate
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
PATIENCE_S = 0.002  # of a step, for its texts to stay together: those of which it is not known by then miss it
REPLAYED_TOKENS_PER_S = 2000

log = logging.getLogger(__name__)


@frozen
class Failure:
    """Why an answer cannot be followed: as in `Refused`."""

    code: RefusalCode
    message: str


class Answer(Protocol):
    """How far one answer has come in what it must follow.

    pending: whether it is not known yet what may follow
    allowed: one bit for each token id that may come next, the lowest bit of a byte first
    complete: whether nothing can follow
    failure: why the answer cannot go on
    """

    pending: bool
    allowed: bytes
    complete: bool
    failure: Failure | None

    def take(self, token: int) -> None:
        """The answer goes on with this token, an allowed one; it is pending then."""
        ...

    def close(self) -> None:
        """Nobody wants to know any more."""
        ...


class Constraints(Protocol):
    """What starts answers that must follow something."""

    def start(self, ask: Generate) -> Answer:
        """The beginning of an answer to a request that has a grammar or calls; it may be pending."""
        ...

    def marks(self, calls: Calls) -> dict[int, str]:
        """As in `Grammars`."""
        ...


class FollowedAnswer:
    """An `Answer` by the helper process."""

    def __init__(self, owner: FollowedAnswers, number: int, source: Source) -> None:
        self._owner = owner
        self.number, self.source = number, source
        self.tokens: list[int] = []
        self.arrived_s = time.monotonic()
        self.attempts = 0  # of a mask, that have failed
        self.pending = True
        self.allowed = b""
        self.complete = False
        self.failure: Failure | None = None
        self.closed = False

    def take(self, token: int) -> None:
        """As in `Answer`."""
        self.tokens.append(token)
        self.pending = True
        self._owner.ask_next(self)

    def close(self) -> None:
        """As in `Answer`."""
        self.closed = True

    def settle(self, failure: Failure | None = None) -> None:
        """It is not pending any more."""
        self.pending, self.failure, self.attempts = False, failure, 0
        self._owner.settled = True


class FollowedAnswers:
    """`Constraints` by a helper process that starts with the first request.

    memory_bytes, vocabulary_bytes: by how much grammars may make the process grow, and reading the vocabulary
    descriptor, due_s: when `receive` is to be called, as in `Helper`
    """

    def __init__(self, grammars: Grammars, memory_bytes: int, vocabulary_bytes: int = 0) -> None:
        self._grammars = grammars
        work = preparing(grammars, memory_bytes // 2)
        self._helper = Helper(work, memory_bytes=memory_bytes, setup_bytes=vocabulary_bytes)
        self._numbers = 0
        self.settled = False  # whether any answer is not pending any more since the last `receive`
        self._served = 0  # requests that the process has answered
        self._asked: dict[int, FollowedAnswer] = {}  # by job
        self._to_continue: list[FollowedAnswer] = []  # not submitted yet: see `submit`
        self._to_open: deque[FollowedAnswer] = deque()
        self.descriptor = self._helper.descriptor

    @classmethod
    def of(cls, manifest: Manifest, tokenizer: Tokenizer, end_tokens: Iterable[int], memory_bytes: int) -> Self:
        """Those of a package, within the memory that the plan has for them."""
        grammars = Grammars(tokenizer, manifest.model.vocabulary, end_tokens)
        return cls(grammars, memory_bytes, vocabulary_bytes(manifest))

    @property
    def due_s(self) -> float:
        """Infinity while nothing is asked."""
        if self.settled:
            return 0.0
        due_s = self._helper.due_s
        return math.inf if due_s is None else due_s

    @property
    def pid(self) -> int | None:
        """The helper process, if there is one."""
        return self._helper.pid

    def marks(self, calls: Calls) -> dict[int, str]:
        """As in `Constraints`."""
        return self._grammars.marks(calls)

    def start(self, ask: Generate) -> FollowedAnswer:
        """As in `Constraints`."""
        self._numbers += 1
        answer = FollowedAnswer(self, self._numbers, Source(ask.calls, ask.grammar, ask.grammar_syntax))
        self._to_open.append(answer)
        self._open_next()
        return answer

    def ask_next(self, answer: FollowedAnswer) -> None:
        """Request what may follow the answer's last token, with the next `submit`."""
        self._to_continue.append(answer)

    def submit(self) -> None:
        """Send the helper process the tokens that answers have taken.

        Apart from `take`, so that the workers of the next step wake before the helper process does: a wake-up costs as
        much as the mask.
        """
        for answer in self._to_continue:
            request = packed_continuation(answer.number, len(answer.tokens) - 1, answer.tokens[-1])
            self._submit(answer, request, WITHIN_S)
        self._to_continue.clear()

    def receive(self) -> bool:
        """Process what the helper process has sent. Returns True if any answer is not pending any more."""
        self.submit()
        for outcome in self._helper.receive():
            self._take(outcome)
        self._open_next()
        settled, self.settled = self.settled, False
        return settled

    def wait(self, answers: Iterable[Answer], timeout_s: float = PATIENCE_S) -> None:
        """Wait until none of these is pending, at most so long."""
        self.submit()
        deadline, answers = time.monotonic() + timeout_s, list(answers)
        while any(answer.pending for answer in answers) and (left_s := deadline - time.monotonic()) > 0:
            for outcome in self._helper.wait(left_s):
                self._take(outcome)
            self._open_next()
        self.settled = False  # the caller looks at every answer now

    def close(self) -> None:
        """End the helper process."""
        self._helper.dispose()

    def _open_next(self) -> None:
        """One compilation at a time, so that a token waits for one at most."""
        while self._to_open and not self._asked and not self._to_continue:
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

    def _submit(self, answer: FollowedAnswer, request: bytes, timeout_s: float) -> None:
        try:
            self._asked[self._helper.submit(request, timeout_s)] = answer
        except UntrustedError as error:
            answer.settle(Failure("failed", f"grammar: {error}"))

    def _take(self, outcome: Outcome) -> None:
        answer = self._asked.pop(outcome.job)
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

    def _failed(self, answer: FollowedAnswer, error: UntrustedError) -> None:
        """The process has died, or the library has failed, at this answer's request."""
        served, self._served = self._served, 0
        if error.reason in ("memory", "died") and served and not answer.attempts:
            answer.attempts = 1  # what others had there may have been the reason: once more, alone
            self._to_open.appendleft(answer)
        elif error.reason in ("failed", "unavailable"):
            log.error("the grammar library failed: %s", error)
            answer.settle(Failure("failed", "grammar: the grammar library has failed at it; see the coordinator's log"))
        else:
            answer.settle(Failure("bad_request", f"grammar: {error}"))
