"""Questions to a live run, whose answers must agree for all implementations of its roles."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Literal

import numpy as np
from neuronpipe.launch.client import Client
from neuronpipe.launch.conformance.agreement import Answers
from neuronpipe.launch.scoring import score
from neuronpipe.launch.supervisor.start import LiveRun
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.document import Plan
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.memory.segments import Mapping
from neuronpipe.protocol.messages.client import Finished, Scored, Status, Token
from neuronpipe.protocol.messages.request import Generate
from numpy.typing import NDArray

PROMPT_TOKENS, TEXT_TOKENS, DECODE_TOKENS, PREFILL_TOKENS = 12, 5, 4, 16  # small, because each step reads most weights
ANSWERED_TOKENS = TEXT_TOKENS + DECODE_TOKENS + PREFILL_TOKENS
SHARED_TOKENS = 8
POLL_S = 0.01


class PendingQuestion:
    """The question that a client waits for, to explain an answer that comes too late.

    question: what was asked for
    answer: how much of the answer came, in words
    notes: the processes that keep the run waiting
    """

    def __init__(self) -> None:
        self.question, self.answer, self.notes = "whether the run is ready", "no", ""

    def begin(self, question: str) -> None:
        self.question, self.answer, self.notes = question, "nothing", ""

    def update(self, status: Status | None) -> None:
        self.notes = "" if status is None else status.notes()

    def describe_timeout(self, limit_s: float) -> str:
        notes = f"; {self.notes}" if self.notes else ""
        return f"asked for {self.question}, it answered {self.answer} within {limit_s:.0f} s{notes}"


class Probe:
    """A live run that gets the same questions repeatedly. Its plan has a context of at least PREFILL_TOKENS."""

    def __init__(self, run: LiveRun, package: Package, plan: Plan) -> None:
        self._run, self._package, self._plan = run, package, plan
        self._pending: dict[Client, PendingQuestion] = {}

    def answers(self, limit_s: float, computed: Callable[[int], None] = lambda tokens: None) -> Answers:
        """Return the run's answers: rows of logits, and a generated text.

        computed: called with the number of further tokens, of ANSWERED_TOKENS in total

        limit_s: time limit in seconds, for all answers together

        Raises UserError after the time limit, if the run ends, or if the processes of a role differ in numerics.
        """
        with self.client(limit_s) as client:
            answers = Answers(_numerics(client.status()))
            answers.texts["a text"] = self.text(client, on_token=lambda: computed(1))
            self._rows(client, answers, computed)
        return answers

    @contextlib.contextmanager
    def client(self, limit_s: float) -> Iterator[Client]:
        """Yield a client of the run once it is ready.

        limit_s: time limit in seconds for that and for all answers to the client; then UserError is raised
        """
        deadline, pending = time.monotonic() + limit_s, PendingQuestion()

        def failed() -> str | None:
            if (reason := self._run.failed()) is not None:
                return reason
            return pending.describe_timeout(limit_s) if time.monotonic() > deadline else None

        with Client(self._run.directory.endpoint(CONTROL), failed) as client:
            while not (status := client.status()).ready:
                pending.update(status)
                time.sleep(POLL_S)
                if (reason := failed()) is not None:
                    raise UserError(f"not ready: {reason}")
            self._pending[client] = pending
            try:
                yield client
            finally:
                del self._pending[client]

    def _tokens(self, count: int, first: int = 0) -> tuple[int, ...]:
        context, vocabulary = self._plan.compute.context_tokens, self._package.manifest.model.vocabulary
        return tuple((7919 * (first + n) + 1) % vocabulary for n in range(min(count, context)))

    def text(
        self,
        client: Client,
        tokens: int = TEXT_TOKENS,
        first: int = 0,
        on_token: Callable[[], None] = lambda: None,
        *,
        like: int | None = None,
        share: bool = True,
    ) -> str:
        """Return the ids of the most likely tokens after a prompt, separated by blanks.

        tokens: number of tokens to generate
        first: number that determines the prompt
        on_token: called for every token
        like: number of another prompt, whose first SHARED_TOKENS tokens replace those of this one
        share: whether keys and values of these tokens may be reused
        """
        prompt = self._tokens(PROMPT_TOKENS, first)
        if like is not None:
            prompt = self._tokens(SHARED_TOKENS, like) + prompt[SHARED_TOKENS:]
        request = Generate(
            request=f"text-{first}",
            tokens=prompt,
            max_tokens=tokens,
            temperature=0.0,
            ignore_end=True,
            share_prefix=share and like is not None,
        )
        chosen: dict[int, int] = {}
        pending = self._pending[client]
        pending.begin(f"a text of {tokens} tokens after a prompt of {len(prompt)}")
        for message in client.request(request, pending.update):
            if isinstance(message, Token):
                chosen[message.index] = message.token
                pending.answer = f"{len(chosen)} of them"
                on_token()
            if isinstance(message, Finished):
                return " ".join(str(chosen[n]) for n in sorted(chosen))
        raise AssertionError

    def _rows(self, client: Client, answers: Answers, computed: Callable[[int], None]) -> None:
        paths: tuple[tuple[Literal["decode", "prefill"], int], ...] = (
            ("decode", DECODE_TOKENS),
            ("prefill", PREFILL_TOKENS),
        )
        with self._exchange() as exchange:
            logits = exchange.view("logits")
            for path, count in paths:
                tokens = self._tokens(count)
                rows = answers.rows[path] = {}
                keep = _keep_rows(logits, self._package.manifest.model.vocabulary, path, rows, computed)
                pending = self._pending[client]
                pending.begin(f"logits after {count} tokens by {path}")
                score(client, tokens, window_tokens=len(tokens), path=path, keep=keep, on_wait=pending.update)

    def _exchange(self) -> Mapping:
        run_file = self._run.directory.read()
        with run_file.open_segment("exchange") as segment:
            return segment.map()


def _numerics(status: Status) -> dict[str, str]:
    """Return the numerics by role. Raises UserError if processes of a role differ."""
    by_role = {process.role: process.numerics for process in status.processes if process.numerics}
    for process in status.processes:
        if process.numerics != by_role.get(process.role, ""):
            raise UserError(
                f"{process.role}.{process.index} computes in {process.numerics}, another {process.role} worker in "
                f"{by_role[process.role]}: replace all of them at once, `neuronpipe swap {process.role}`"
            )
    return by_role


def _keep_rows(
    logits: memoryview,
    vocabulary: int,
    path: str,
    rows: dict[str, NDArray[np.float32]],
    computed: Callable[[int], None],
) -> Callable[[int, Scored], None]:
    def keep(first: int, scored: Scored) -> None:
        for number in range(scored.rows):
            row = logits[(scored.row + number) * vocabulary : (scored.row + number + 1) * vocabulary]
            name = f"logits after token {first + scored.position + number} ({path})"
            rows[name] = np.array(row, np.float32)
        computed(scored.rows)

    return keep
