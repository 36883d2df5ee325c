"""The dry run of an implementation before it takes a seat: a small run of the same package beside the live one.

It shares nothing with the live run but the sealed fixed tensors, so that whatever goes wrong there goes wrong there.
The present implementations answer first; then the seats change hands as they will on the live run, and the same is
asked again: every logit must have the same bits.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from neuronpipe.launch import door
from neuronpipe.launch.client import Client
from neuronpipe.launch.live import LiveRun, started_run
from neuronpipe.launch.rating import rate
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.account import least_slots_bytes
from neuronpipe.plans.plan.plan import GATEWAY, Plan
from neuronpipe.plans.plan.planner import DeviceFacts, Wanted
from neuronpipe.plans.plan.planner import plan as make_plan
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.links import CONTROL
from neuronpipe.protocol.messages.client import Finished, Scored
from neuronpipe.protocol.messages.request import Generate
from neuronpipe.protocol.run_directory import RunDirectory, RunFile
from neuronpipe.protocol.segments import Mapping, Segment
from neuronpipe.services.implementations import Implementations
from neuronpipe.services.memory import run_layouts

CONTEXT_TOKENS = 64
PROMPT_TOKENS, TEXT_TOKENS, DECODE_TOKENS, PREFILL_TOKENS = 12, 5, 4, 16  # few: most weights are read for each step
SLOTS_BYTES = 128 << 20  # at most, where that is enough; and half of the neurons, so that some are always missing
SLOWER = 4  # than the present implementation, and the patience besides: later than that is too late
FOLDER = "rehearsal"
POLL_S = 0.01


@dataclass(frozen=True)
class Candidate:
    """Who is to take which seats. use None: fresh processes of the same implementations."""

    seats: tuple[str, ...]
    use: str | None
    folder: str
    patience_s: float

    def request(self) -> dict[str, Any]:
        """What the supervisor is asked at its door."""
        return {
            "ask": "swap",
            "seats": list(self.seats),
            "use": self.use,
            "folder": self.folder,
            "patience_s": self.patience_s,
        }

    def take_seats(self, directory: RunDirectory) -> dict[str, int]:
        """Have the seats change hands; returns the new process ids. Raises UserError with the supervisor's reason."""
        return dict(door.ask(directory.path, self.request(), 2 * self.patience_s + 10)["pids"])


def small_plan(package: Package, plan: Plan) -> Plan:
    """A plan with the same seats for one short text, in as little memory as will do; no core is taken for itself."""
    manifest, workers = package.manifest, len(plan.compute.decode_workers())
    seats = tuple(replace(seat, core=None) for seat in plan.compute.seats if seat.role != GATEWAY)
    facts = DeviceFacts(
        id=plan.device_id, memory_bytes=plan.memory.limit_bytes, flash_engine=plan.flash.engine, seats=seats
    )
    slots_bytes = max(2 * least_slots_bytes(manifest, workers), min(SLOTS_BYTES, plan.memory.ffn_bytes // 2))
    wanted = Wanted(
        ffn_resident_share=min(1.0, slots_bytes / plan.memory.ffn_bytes),
        context_tokens=min(CONTEXT_TOKENS, manifest.shape.context_tokens),
        mode=plan.compute.mode,
    )
    made = make_plan(manifest, facts, wanted)
    return replace(made, compute=replace(made.compute, spin_us=0))


def rehearse(live: RunDirectory, run_file: RunFile, package: Package, plan: Plan, candidate: Candidate) -> None:
    """Raises UserError saying what the candidate did wrong."""
    small = small_plan(package, plan)
    present = Implementations.from_facts(door.ask(live.path, {"ask": "implementations"}, candidate.patience_s))
    layout = run_layouts(package.manifest, plan)["fixed"]
    with (
        Segment.open(layout, run_file.supervisor_pid, run_file.segments["fixed"].fd) as fixed,
        started_run(package, small, live.path / FOLDER, stays=False, uses=present, fixed=fixed) as run,
    ):
        stage = _Stage(run, package, small)
        began = time.monotonic()
        expected = stage.answers(math.inf)
        limit_s = candidate.patience_s + SLOWER * (time.monotonic() - began)
        candidate.take_seats(run.directory)
        for what, bits in stage.answers(limit_s).items():
            if bits != expected[what]:
                raise UserError(f"computes other bits than the present implementation: {what}")


class _Stage:
    """The small run, asked the same questions twice."""

    def __init__(self, run: LiveRun, package: Package, plan: Plan) -> None:
        self._run, self._package, self._plan = run, package, plan

    def answers(self, limit_s: float) -> dict[str, str]:
        """What the run computes, by what it is: digests of logit rows, and a text. Raises UserError when it takes
        longer than `limit_s`."""
        deadline = time.monotonic() + limit_s

        def failed() -> str | None:
            if (reason := self._run.failed()) is not None:
                return reason
            late = time.monotonic() > deadline
            return f"did not answer within {limit_s:.0f} s" if late else None

        with Client(self._run.directory.endpoint(CONTROL), failed) as client:
            while not client.status().ready:
                time.sleep(POLL_S)
                if (reason := failed()) is not None:
                    raise UserError(reason)
            return {"a text": self._text(client)} | dict(self._rows(client))

    def _tokens(self, count: int) -> tuple[int, ...]:
        context, vocabulary = self._plan.compute.context_tokens, self._package.manifest.shape.vocabulary
        return tuple((7919 * n + 1) % vocabulary for n in range(min(count, context)))

    def _text(self, client: Client) -> str:
        prompt = self._tokens(PROMPT_TOKENS)
        ask = Generate(
            request="rehearsal",
            tokens=prompt,
            max_tokens=TEXT_TOKENS,
            temperature=0.0,
            ignore_end=True,
            share_prefix=False,
        )
        for message in client.request(ask):
            if isinstance(message, Finished):
                return message.text
        raise AssertionError

    def _rows(self, client: Client) -> Iterator[tuple[str, str]]:
        paths: tuple[tuple[Literal["decode", "prefill"], int], ...] = (
            ("decode", DECODE_TOKENS),
            ("prefill", PREFILL_TOKENS),
        )
        digests: dict[str, str] = {}
        with self._exchange() as exchange:
            logits = exchange.view("logits")
            for path, count in paths:
                tokens = self._tokens(count)
                keep = _digest_rows(logits, self._package.manifest.shape.vocabulary, path, digests)
                rate(client, tokens, window_tokens=len(tokens), path=path, keep=keep)
        yield from digests.items()

    def _exchange(self) -> Mapping:
        run_file = self._run.directory.read()
        layout = run_layouts(self._package.manifest, self._plan)["exchange"]
        with Segment.open(layout, run_file.supervisor_pid, run_file.segments["exchange"].fd) as segment:
            return segment.map()


def _digest_rows(
    logits: memoryview, vocabulary: int, path: str, digests: dict[str, str]
) -> Callable[[int, Scored], None]:
    def keep(first: int, scored: Scored) -> None:
        for number in range(scored.rows):
            row = logits[(scored.row + number) * vocabulary : (scored.row + number + 1) * vocabulary]
            name = f"logits after token {first + scored.position + number} ({path})"
            digests[name] = hashlib.sha256(row).hexdigest()

    return keep
