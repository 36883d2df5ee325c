"""Memory of the KV cache, of prefill and of grammars. Weight slots borrow it until it is reserved.

    state                                 action
    the next step has its memory          none: the step is sent
    some of its memory is not reserved    `ReserveMemory`; the step is sent when the cache has answered
    no prefill for RELEASE_AFTER_S        `ReleaseMemory`; then less is reserved
    a request has a grammar               `ReserveMemory`; it is compiled when the cache has answered
    no process follows grammars any more  less is reserved

This module has no sockets and no clock. The content of free KV slots stays until another sequence uses them or
`prefix_reuse.FORGET_AFTER_S` has passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.borrowed_memory import BorrowableMemory
from neuronpipe.plans.plan.document import Plan
from neuronpipe.protocol.messages.worker import Prefill, Step
from neuronpipe.services.coordinator.scheduling.events import ReleaseMemory, ReserveMemory

RELEASE_AFTER_S = 2.0  # prompts often come in series; each reclaim evicts weights that must be read again


class Reservation:
    """The reserved memory of a run.

    borrowable: memory that weight slots may borrow; None: they borrow none, and every step has its memory
    kv_tokens: number of tokens that have memory, for each KV slot, as a previous coordinator left it
    """

    def __init__(self, borrowable: BorrowableMemory | None, kv_tokens: Sequence[int]) -> None:
        self._borrowable = borrowable
        self._kv_tokens = [*kv_tokens]
        self._stage_tokens = borrowable.chunk_tokens if borrowable and any(kv_tokens) else 0
        self._has_grammars = False
        self._number = 0  # of the last `Reserve`
        self._requested = 0  # number of the last request for more memory
        self._answered = 0  # number of the last request that the cache has answered
        self._releasing: tuple[int, ...] | None = None  # `_kv_tokens` before the release
        self._prompt_at = 0.0

    @classmethod
    def of(cls, manifest: Manifest, plan: Plan, kv_tokens: Sequence[int]) -> Self:
        borrowable = (
            BorrowableMemory.of(manifest, plan.compute, plan.memory) if plan.memory.has_borrowed_slots else None
        )
        return cls(borrowable, kv_tokens)

    @property
    def waits(self) -> bool:
        return self.awaits_cache or self.awaits_prefill

    @property
    def awaits_cache(self) -> bool:
        """True while the cache has not answered `Reserve`."""
        return self._answered < self._requested

    @property
    def awaits_prefill(self) -> bool:
        """True while the prefill worker has not answered `Release`."""
        return self._releasing is not None

    def covers(self, message: Step | Prefill, later: int = 0) -> bool:
        """Return True if the memory of a step is reserved.

        While the cache owes an answer, no step has its memory. While memory is being released, a decode step may use
        what stays reserved, and prefill has none.

        later: added to the number of tokens of each sequence, to ask for a later decode step
        """
        if self._borrowable is None:
            return True
        if self._answered < self._requested or (self._releasing is not None and isinstance(message, Prefill)):
            return False
        return not self._missing(message, later)

    def covers_restore(self, slot: int, tokens: int) -> bool:
        """Return True if the memory of this many tokens of a KV slot is reserved, and none is being released."""
        return self._borrowable is None or (not self.waits and tokens <= self._kv_tokens[slot])

    def ask_restore(self, slot: int, tokens: int) -> list[ReserveMemory]:
        """Return the action that reserves the memory of a KV slot; none while an answer is outstanding."""
        if self.waits or self._borrowable is None:
            return []
        self._kv_tokens[slot] = max(self._kv_tokens[slot], self._borrowable.granted_tokens(tokens))
        return [self._reserve_more()]

    def ask(self, message: Step | Prefill) -> list[ReserveMemory]:
        """Return the action that reserves the memory of this step; none while an answer is outstanding."""
        if self.waits or self._borrowable is None:
            return []
        for slot, tokens in _slot_tokens(message):
            self._kv_tokens[slot] = max(self._kv_tokens[slot], self._borrowable.granted_tokens(tokens))
        if isinstance(message, Prefill):
            self._stage_tokens = max(self._stage_tokens, self._borrowable.stage_tokens(len(message.tokens)))
        return [self._reserve_more()]

    @property
    def covers_grammars(self) -> bool:
        """True if the memory of grammars is reserved."""
        return self._borrowable is None or (self._has_grammars and not self.awaits_cache)

    def ask_grammars(self) -> list[ReserveMemory]:
        """Return the action that reserves the memory of grammars; none while an answer is outstanding."""
        if self.waits or self._borrowable is None:
            return []
        self._has_grammars = True
        return [self._reserve_more()]

    @property
    def holds_grammars(self) -> bool:
        """True if memory of grammars is reserved, or was asked for, and may be released."""
        return self._has_grammars and not self.waits

    def release_grammars(self) -> list[ReserveMemory]:
        """Return the action that tells the cache that grammars need no memory; none if they have none."""
        if not self.holds_grammars:
            return []
        self._has_grammars = False
        return [self._reserve()]

    def ask_again(self) -> list[ReserveMemory]:
        """Return the action that repeats an unanswered request to a new cache process, which has not received it."""
        if self._answered < self._requested:
            return [self._reserve_more()]
        return [self._reserve()] if self._answered < self._number else []

    def reserved(self, number: int) -> None:
        """Process the cache's answer to `Reserve`."""
        self._answered = max(self._answered, number)

    def sent(self, message: Step | Prefill, now: float) -> None:
        if isinstance(message, Prefill):
            self._prompt_at = now

    def may_release(self, now: float) -> bool:
        """Return True if memory for prefill has not been used for RELEASE_AFTER_S."""
        return bool(self._stage_tokens) and not self.waits and now - self._prompt_at >= RELEASE_AFTER_S

    def release(self, used_tokens: Sequence[int]) -> ReleaseMemory:
        """Release memory between two steps.

        used_tokens: the number of tokens to keep in each KV slot
        """
        assert self._borrowable is not None
        self._releasing = tuple(self._kv_tokens)
        sizes = zip(self._kv_tokens, map(self._borrowable.granted_tokens, used_tokens), strict=True)
        self._kv_tokens = [min(pair) for pair in sizes]
        return ReleaseMemory(tuple(self._kv_tokens))

    def released(self) -> list[ReserveMemory]:
        """Process the prefill worker's answer: tell the cache that less is reserved."""
        if self._releasing is None:
            return []
        self._releasing, self._stage_tokens = None, 0
        return [self._reserve()]

    def prefill_lost(self) -> None:
        """Restore the reservation from before a release that the lost prefill worker has not answered. Its successor
        is asked again later."""
        if self._releasing is not None:
            self._kv_tokens, self._releasing = [*self._releasing], None

    def _missing(self, message: Step | Prefill, later: int = 0) -> bool:
        assert self._borrowable is not None
        if any(tokens + later > self._kv_tokens[slot] for slot, tokens in _slot_tokens(message)):
            return True
        return isinstance(message, Prefill) and self._borrowable.stage_tokens(len(message.tokens)) > self._stage_tokens

    def _reserve_more(self) -> ReserveMemory:
        action = self._reserve()
        self._requested = action.number
        return action

    def _reserve(self) -> ReserveMemory:
        assert self._borrowable is not None
        self._number += 1
        reserved_bytes = self._borrowable.reserved_bytes(
            self._kv_tokens, self._stage_tokens, has_grammars=self._has_grammars
        )
        return ReserveMemory(self._number, reserved_bytes, tuple(self._kv_tokens))


def _slot_tokens(message: Step | Prefill) -> list[tuple[int, int]]:
    """Return pairs of a KV slot and the number of tokens that it holds after this step."""
    if isinstance(message, Prefill):
        return [(message.sequence, message.position + len(message.tokens))]
    return [(slot, position + 1) for slot, position in zip(message.sequences, message.positions, strict=True)]
