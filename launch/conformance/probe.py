"""Questions to a live run whose answers must agree, whoever works for it and whatever happens meanwhile."""

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
from neuronpipe.protocol.messages.client import Finished, Scored, Status, Token
from neuronpipe.protocol.messages.request import Generate
from neuronpipe.protocol.segments import Mapping
from numpy.typing import NDArray

PROMPT_TOKENS, TEXT_TOKENS, DECODE_TOKENS, PREFILL_TOKENS = 12, 5, 4, 16  # few: most weights are read for each step
ANSWERED_TOKENS = TEXT_TOKENS + DECODE_TOKENS + PREFILL_TOKENS
SHARED_TOKENS = 8
POLL_S = 0.01


class Asked:
    """What a client is waiting for, for who reads that it did not come in time.

    question: what was asked for; answered: how much of it came, in words; notes: of whom the run waits in vain
    """

    def __init__(self) -> None:
        self.question, self.answered, self.notes = "whether the run is ready", "no", ""

    def ask(self, question: str) -> None:
        """Something new is asked for."""
        self.question, self.answered, self.notes = question, "nothing", ""

    def heard(self, status: Status | None) -> None:
        """How the run is meanwhile."""
        self.notes = "" if status is None else status.notes()

    def overdue(self, limit_s: float) -> str:
        """What to say when it did not come within the limit."""
        why = f"; {self.notes}" if self.notes else ""
        return f"asked for {self.question}, it answered {self.answered} within {limit_s:.0f} s{why}"


class Probe:
    """A live run, asked the same questions again and again. Its plan has one context of PREFILL_TOKENS at least."""

    def __init__(self, run: LiveRun, package: Package, plan: Plan) -> None:
        self._run, self._package, self._plan = run, package, plan
        self._asked: dict[Client, Asked] = {}  # of each client there is

    def answers(self, limit_s: float, computed: Callable[[int], None] = lambda tokens: None) -> Answers:
        """What the run computes: rows of logits, and a text. computed: called with how many more of ANSWERED_TOKENS
        there are. Raises UserError when it takes longer than `limit_s`, or when the processes of a role differ in their
        numerics."""
        with self.client(limit_s) as client:
            answers = Answers(_numerics(client.status()))
            answers.texts["a text"] = self.text(client, seen=lambda: computed(1))
            self._rows(client, answers, computed)
        return answers

    @contextlib.contextmanager
    def client(self, limit_s: float) -> Iterator[Client]:
        """A client of the run, when it is ready. Raises UserError when that, or an answer, is not there in time."""
        deadline, asked = time.monotonic() + limit_s, Asked()

        def failed() -> str | None:
            if (reason := self._run.failed()) is not None:
                return reason
            late = time.monotonic() > deadline
            return asked.overdue(limit_s) if late else None

        with Client(self._run.directory.endpoint(CONTROL), failed) as client:
            while not (status := client.status()).ready:
                asked.heard(status)
                time.sleep(POLL_S)
                if (reason := failed()) is not None:
                    raise UserError(f"not ready: {reason}")
            self._asked[client] = asked
            try:
                yield client
            finally:
                del self._asked[client]

    def _tokens(self, count: int, first: int = 0) -> tuple[int, ...]:
        context, vocabulary = self._plan.compute.context_tokens, self._package.manifest.model.vocabulary
        return tuple((7919 * (first + n) + 1) % vocabulary for n in range(min(count, context)))

    def text(
        self,
        client: Client,
        tokens: int = TEXT_TOKENS,
        first: int = 0,
        seen: Callable[[], None] = lambda: None,
        *,
        like: int | None = None,
        share: bool = True,
    ) -> str:
        """The likeliest tokens after a prompt, in words. first: which prompt; seen: called with every token; like: the
        prompt with which it shares its beginning; share: whether its keys and values are taken then, where they are
        still there."""
        prompt = self._tokens(PROMPT_TOKENS, first)
        if like is not None:
            prompt = self._tokens(SHARED_TOKENS, like) + prompt[SHARED_TOKENS:]
        ask = Generate(
            request=f"text-{first}",
            tokens=prompt,
            max_tokens=tokens,
            temperature=0.0,
            ignore_end=True,
            share_prefix=share and like is not None,
        )
        chosen: dict[int, int] = {}
        asked = self._asked[client]
        asked.ask(f"a text of {tokens} tokens after a prompt of {len(prompt)}")
        for message in client.request(ask, asked.heard):
            if isinstance(message, Token):
                chosen[message.index] = message.token
                asked.answered = f"{len(chosen)} of them"
                seen()
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
                asked = self._asked[client]
                asked.ask(f"logits after {count} tokens by {path}")
                score(client, tokens, window_tokens=len(tokens), path=path, keep=keep, quiet=asked.heard)

    def _exchange(self) -> Mapping:
        run_file = self._run.directory.read()
        with run_file.open_segment("exchange") as segment:
            return segment.map()


def _numerics(status: Status) -> dict[str, str]:
    """By role. Raises UserError when a role's processes differ: what they compute would depend on who computes what."""
    found = {process.role: process.numerics for process in status.processes if process.numerics}
    for process in status.processes:
        if process.numerics != found.get(process.role, ""):
            raise UserError(
                f"{process.role}.{process.index} computes in {process.numerics}, another {process.role} worker in "
                f"{found[process.role]}: replace all of them at once, `neuronpipe swap {process.role}`"
            )
    return found


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
