"""Quarantine of requests that end processes.

When a process dies, the requests under way run again and give the same tokens. A request that caused the death would
kill the next process too. It is recognized by its place, the number of its computed tokens: a repeated request reaches
the same place by the same computation. A request that was at the same place at two deaths is suspected; one that gets
past that place is cleared.

    at the deaths, the request was                then
    at the same place, and it was the only one    it is refused with "ended_a_process"
    at the same place, as were others             each of them runs apart from other suspects, so that the next death
                                                  has one suspect
    at the same place, and the cause was SIGKILL  as above, but only at the third death of the coordinator, or the sixth
                                                  during one step, since random kills hit a place several times

The requests under way are listed in the ledger, in shared memory that outlives the coordinator. A new coordinator thus
knows what its predecessor was computing. A request is identified by a fingerprint of everything that decides its
tokens, so that it is recognized under another name or from another client.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable
from typing import Final

from neuronpipe.protocol.codec import encode
from neuronpipe.protocol.frozen import frozen
from neuronpipe.protocol.layouts.run import LEDGER_ENTRY, SUSPECTS
from neuronpipe.protocol.messages.request import Generate, Score, Tokenize

CRASH_WEIGHT, KILL_WEIGHT, CERTAIN = 3, 2, 6  # certain after two crashes, or three deaths with SIGKILL among them
STEP_KILL_WEIGHT = 1  # a step that waits for a restarted process takes long, so that outside kills often hit it
SAME_PLACE_TOKENS: Final = 1  # native code may be a token ahead of the ledger
FORGET_AFTER_S: Final = 600.0  # a cause outside the request may have passed by then
ENDED = "this request ended a process of the run twice, and is not run again"

FINGERPRINT, PLACE, WEIGHT, LAST_DEATH_S = range(len(LEDGER_ENTRY))


def fingerprint(request: Generate | Score | Tokenize) -> int:
    """Return the fingerprint of one sequence, never 0: a hash of everything but its name and owner.

    The sequences of a request differ in their seeds, so that each has its own place.
    """
    nameless = dataclasses.replace(request, request="")
    if not isinstance(nameless, Tokenize):
        nameless = dataclasses.replace(nameless, owner="")
    return int.from_bytes(hashlib.blake2b(encode(nameless), digest_size=8).digest(), "little") or 1


def request_fingerprint(request: Generate | Score | Tokenize) -> int:
    """Return the fingerprint of a request without its seed, which is random if the client gives none.

    A request that ended processes is refused by this one, whichever of its sequences was the cause.
    """
    return fingerprint(dataclasses.replace(request, seed=0) if isinstance(request, Generate) else request)


@frozen
class Suspect:
    """A request that was at `place` when processes died.

    weight: the sum of the weights of these deaths
    last_death_s: the time of the last one, in seconds of the monotonic clock
    """

    place: int
    weight: int
    last_death_s: int

    @property
    def is_certain(self) -> bool:
        """True if the deaths suffice to refuse the request, provided that no other request is suspected as much."""
        return self.weight >= CERTAIN


class Ledger:
    """The ledger in the board's field `ledger`: the request of each KV slot, and the suspects.

    words: the field as 64-bit words: entries of `LEDGER_ENTRY`, one per KV slot, one for the request that is being
        admitted, and `SUSPECTS` for suspects
    """

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._width = len(LEDGER_ENTRY)
        self.slots = len(words) // self._width - SUSPECTS - 1

    def set(self, entry: int, *values: int) -> None:
        """Write the first words of an entry. The fingerprint is written last, so that a torn entry reads as the old
        one."""
        at = entry * self._width
        for place in reversed(range(len(values))):
            self._words[at + place] = values[place]

    def get(self, entry: int) -> tuple[int, ...]:
        at = entry * self._width
        return tuple(self._words[at : at + self._width])

    @property
    def admission(self) -> int:
        """The entry of the request that is being admitted."""
        return self.slots

    def under_way(self) -> dict[int, list[int]]:
        """Return the places of the requests under way by fingerprint, which several sequences may share."""
        places: dict[int, list[int]] = {}
        for entry in map(self.get, range(self.slots + 1)):
            if entry[FINGERPRINT]:
                places.setdefault(entry[FINGERPRINT], []).append(entry[PLACE])
        return places

    def clear(self) -> None:
        for entry in range(self.slots + 1):
            self.set(entry, 0)

    def suspects(self) -> dict[int, Suspect]:
        """Return the suspects that earlier coordinators recorded, by fingerprint."""
        entries = (self.get(self.slots + 1 + number) for number in range(SUSPECTS))
        return {entry[FINGERPRINT]: Suspect(*entry[PLACE:]) for entry in entries if entry[FINGERPRINT]}

    def keep(self, suspects: dict[int, Suspect]) -> None:
        """Write the suspects; if there are more than SUSPECTS, those of the latest deaths."""
        latest = sorted(suspects.items(), key=lambda item: -item[1].last_death_s)[:SUSPECTS]
        for number in range(SUSPECTS):
            values = (latest[number][0], *dataclasses.astuple(latest[number][1])) if number < len(latest) else (0,)
            self.set(self.slots + 1 + number, *values)


class Quarantine:
    """The suspected and the refused requests. It has no sockets and no clock.

    ledger: None for a private one, which no later coordinator reads
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger = ledger or Ledger(memoryview(bytearray(8 * len(LEDGER_ENTRY) * (SUSPECTS + 1))).cast("Q"))
        self._suspects = self._ledger.suspects()
        self._refused = 0  # requests that were identified as the cause of deaths since `take_refused`

    @classmethod
    def after(cls, words: memoryview, *, killed: bool, now: float) -> Quarantine:
        """Return the quarantine of a coordinator whose predecessor left this ledger.

        killed: True if SIGKILL ended the predecessor
        """
        quarantine = cls(Ledger(words))
        quarantine.coordinator_died(killed=killed, now=now)
        return quarantine

    # ---- deaths ----------------------------------------------------------------------------------------------
    def coordinator_died(self, *, killed: bool, now: float) -> None:
        """Suspect the requests that the predecessor had under way.

        killed: True if SIGKILL ended it
        """
        self.died(self._ledger.under_way(), killed=killed, now=now)
        self._ledger.clear()

    def died(self, under_way: dict[int, list[int]], *, killed: bool, now: float) -> None:
        """Record that a process died.

        under_way: the requests at that moment, with the places of their sequences
        """
        weight = KILL_WEIGHT if killed else CRASH_WEIGHT
        for name, places in under_way.items():
            before = self._suspects.get(name)
            if before is not None and any(abs(before.place - place) <= SAME_PLACE_TOKENS for place in places):
                self._suspects[name] = Suspect(before.place, before.weight + weight, int(now))
            else:
                self._suspects[name] = Suspect(max(places), weight, int(now))
        self._forget(now)
        causes = self._certain(under_way)
        if len(causes) > 1:  # any of them may be the cause: each must run without the others to be identified
            for name in causes:
                suspect = self._suspects[name]
                self._suspects[name] = dataclasses.replace(suspect, weight=CERTAIN - KILL_WEIGHT)
        self._refused += len(causes) == 1
        self._ledger.keep(self._suspects)

    def _certain(self, names: Iterable[int]) -> list[int]:
        return [name for name in names if self._suspects[name].is_certain]

    def _forget(self, now: float) -> None:
        self._suspects = {
            name: suspect for name, suspect in self._suspects.items() if now - suspect.last_death_s < FORGET_AFTER_S
        }

    def take_refused(self) -> int:
        """Return how many requests were identified as the cause of deaths since the last call.

        A request that is refused again does not count, since the supervisor forgives one death history per request.
        """
        refused, self._refused = self._refused, 0
        return refused

    # ---- requests --------------------------------------------------------------------------------------------
    def is_refused(self, name: int, now: float) -> bool:
        suspect = self._suspects.get(name)
        return suspect is not None and suspect.is_certain and now - suspect.last_death_s < FORGET_AFTER_S

    def runs_apart(self, name: int) -> bool:
        """Return True if the request must run apart from other suspects, so that the next death has one suspect."""
        suspect = self._suspects.get(name)
        return suspect is not None and suspect.weight >= CERTAIN - KILL_WEIGHT

    def admits(self, name: int) -> None:
        """Record that the coordinator is admitting a request, which has no KV slot yet.

        name: its fingerprint; 0 when the admission is over
        """
        self._ledger.set(self._ledger.admission, name, 0)

    def computes(self, name: int, slot: int, place: int) -> None:
        """Record that a step is sent for the request in this KV slot.

        place: 1 + the number of its tokens that were computed before this step
        """
        self._ledger.set(slot, name, place)
        suspect = self._suspects.get(name)
        if suspect is not None and not suspect.is_certain and place > suspect.place + SAME_PLACE_TOKENS:
            del self._suspects[name]
            self._ledger.keep(self._suspects)

    def convict(self, name: int, now: float) -> None:
        """Refuse a request that certainly ended processes, such as the only one of a step."""
        self._suspects[name] = Suspect(0, CERTAIN, int(now))
        self._refused += 1
        self._ledger.keep(self._suspects)

    def ends(self, name: int, slot: int) -> None:
        """Record that a request has ended. It is no longer suspected, unless it is refused."""
        self._ledger.set(slot, 0)
        suspect = self._suspects.get(name)
        if suspect is not None and not suspect.is_certain:
            del self._suspects[name]
            self._ledger.keep(self._suspects)
