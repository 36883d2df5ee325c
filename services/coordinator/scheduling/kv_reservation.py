"""Memory for keys and values and for prompts: reserved before a step needs it, and lent to slots of neurons until then.

    of a step                          what happens
    its positions have memory          nothing: it is sent
    they have none                     `ReserveMemory`; the step is sent when the cache has answered
    no prompt for RELEASE_AFTER_S      `ReleaseMemory`; then less is reserved

Without sockets and clock. What KV slots hold of texts that have ended stays until another text takes them, or
until it was of no use for `prefixes.FORGET_AFTER_S`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self

from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.borrowed_memory import BorrowableMemory
from neuronpipe.plans.plan.document import Plan
from neuronpipe.protocol.messages.worker import Prefill, Step
from neuronpipe.services.coordinator.scheduling.events import ReleaseMemory, ReserveMemory

RELEASE_AFTER_S = 2.0  # prompts follow each other: taking their memory back costs neurons that are read again


class Reservation:
    """lendable: None where nothing is lent. kv_tokens: of every KV slot, what has memory; of a coordinator before this
    one."""

    def __init__(self, lendable: BorrowableMemory | None, kv_tokens: Sequence[int]) -> None:
        self._lendable = lendable
        self._kv_tokens = [*kv_tokens]
        self._stage_tokens = lendable.chunk_tokens if lendable and any(kv_tokens) else 0
        self._number = 0
        self._needed = 0  # the number of the last one that asked for more
        self._answered = 0  # the number that the cache has answered
        self._releasing: tuple[int, ...] | None = None  # what slots had before
        self._prompt_at = 0.0

    @classmethod
    def of(cls, manifest: Manifest, plan: Plan, kv_tokens: Sequence[int]) -> Self:
        """That of a plan's run of a package."""
        return cls(
            BorrowableMemory.of(manifest, plan.compute, plan.memory) if plan.memory.has_borrowed_slots else None,
            kv_tokens,
        )

    @property
    def waits(self) -> bool:
        """Whether something was asked for that is not there yet."""
        return self.awaits_cache or self.awaits_prefill

    @property
    def awaits_cache(self) -> bool:
        """Whether the cache has not answered `Reserve` yet."""
        return self._answered < self._needed

    @property
    def awaits_prefill(self) -> bool:
        """Whether the prefill worker has not answered `Release` yet."""
        return self._releasing is not None

    def covers(self, message: Step | Prefill, later: int = 0) -> bool:
        """Whether the step has its memory, or the decode step of the same texts so many tokens later. While memory is
        given back, decode steps go on within what is kept."""
        if self._lendable is None:
            return True
        if self._answered < self._needed or (self._releasing is not None and isinstance(message, Prefill)):
            return False
        return not self._missing(message, later)

    def ask(self, message: Step | Prefill) -> list[ReserveMemory]:
        """Reserve what this step needs. Nothing while something is on its way."""
        if self.waits or self._lendable is None:
            return []
        for slot, tokens in _needed(message):
            self._kv_tokens[slot] = max(self._kv_tokens[slot], self._lendable.granted_tokens(tokens))
        if isinstance(message, Prefill):
            self._stage_tokens = max(self._stage_tokens, self._lendable.stage_tokens(len(message.tokens)))
        return [self._reserve_more()]

    def ask_again(self) -> list[ReserveMemory]:
        """Another cache: it was told nothing."""
        if self._answered < self._needed:
            return [self._reserve_more()]
        return [self._reserve()] if self._answered < self._number else []

    def reserved(self, number: int) -> None:
        """The cache's answer."""
        self._answered = max(self._answered, number)

    def sent(self, message: Step | Prefill, now: float) -> None:
        """A step is sent."""
        if isinstance(message, Prefill):
            self._prompt_at = now

    def may_release(self, now: float) -> bool:
        """Whether memory of prompts is held that none has needed for a while."""
        return bool(self._stage_tokens) and not self.waits and now - self._prompt_at >= RELEASE_AFTER_S

    def release(self, used_tokens: Sequence[int]) -> ReleaseMemory:
        """Between two steps: keep what holds so many tokens of each slot."""
        assert self._lendable is not None
        self._releasing = tuple(self._kv_tokens)
        kept = zip(self._kv_tokens, map(self._lendable.granted_tokens, used_tokens), strict=True)
        self._kv_tokens = [min(pair) for pair in kept]
        return ReleaseMemory(tuple(self._kv_tokens))

    def released(self) -> list[ReserveMemory]:
        """The prefill worker's answer."""
        if self._releasing is None:
            return []
        self._releasing, self._stage_tokens = None, 0
        return [self._reserve()]

    def prefill_lost(self) -> None:
        """The prefill worker is gone, with its stage; its successor is asked instead."""
        if self._releasing is not None:
            self._kv_tokens, self._releasing = [*self._releasing], None

    def _missing(self, message: Step | Prefill, later: int = 0) -> bool:
        assert self._lendable is not None
        if any(tokens + later > self._kv_tokens[slot] for slot, tokens in _needed(message)):
            return True
        return isinstance(message, Prefill) and self._lendable.stage_tokens(len(message.tokens)) > self._stage_tokens

    def _reserve_more(self) -> ReserveMemory:
        asked = self._reserve()
        self._needed = asked.number
        return asked

    def _reserve(self) -> ReserveMemory:
        assert self._lendable is not None
        self._number += 1
        reserved_bytes = self._lendable.reserved_bytes(self._kv_tokens, self._stage_tokens)
        return ReserveMemory(self._number, reserved_bytes, tuple(self._kv_tokens))


def _needed(message: Step | Prefill) -> list[tuple[int, int]]:
    """By KV slot, how many tokens it holds after this step."""
    if isinstance(message, Prefill):
        return [(message.sequence, message.position + len(message.tokens))]
    return [(slot, position + 1) for slot, position in zip(message.sequences, message.positions, strict=True)]
