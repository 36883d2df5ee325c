"""Requests that end processes: how they are recognized, and what becomes of them.

A process that dies takes nobody's request with it: requests run again, and give the same tokens. A request that is the
cause of the death would kill the next process, too. It is recognized by its place: what runs again comes to the same
token by the same computation, so that a request which was at the same place at two deaths is suspected, and one that
has got past that place is cleared.

    the request was, at the deaths,               what becomes of it
    at the same place, no other one was           refused with "ended_a_process"
    at the same place, and so were others         each of them runs while no other suspect does, so that the next
                                                  death has one suspect
    SIGKILL from outside                          as above, at the third death of the coordinator, or the sixth during
                                                  one step: who kills at random hits a place several times now and then

What is under way stands in shared memory, the ledger, which outlives the coordinator that writes it. So a coordinator
that starts knows what its predecessor was doing, whatever ended that, and whoever sends the request again, under
whatever name: a request is known by a fingerprint of all that decides its tokens.
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

CRASH_WEIGHT, KILL_WEIGHT, CERTAIN = 3, 2, 6  # two crashes of the coordinator, or three deaths by SIGKILL among them
STEP_KILL_WEIGHT = 1  # a step that waits for a restarted process is under way for long, and kills from outside hit it
SAME_PLACE_TOKENS: Final = 1  # native code may be a token ahead of what the ledger says
FORGET_AFTER_S: Final = 600.0  # a cause outside the request may have gone by then
ENDED = "this request ended a process of the run twice, and is not run again"

FINGERPRINT, PLACE, WEIGHT, LAST_DEATH_S = range(len(LEDGER_ENTRY))


def fingerprint(request: Generate | Score | Tokenize) -> int:
    """Return a number, never 0, of what one sequence computes: not of its name and its owner. Sequences of a request
    differ in their seeds, and each has a place of its own."""
    nameless = dataclasses.replace(request, request="")
    if not isinstance(nameless, Tokenize):
        nameless = dataclasses.replace(nameless, owner="")
    return int.from_bytes(hashlib.blake2b(encode(nameless), digest_size=8).digest(), "little") or 1


def request_fingerprint(request: Generate | Score | Tokenize) -> int:
    """Return the fingerprint without the seed, which differs each time where the client gives none: by this a request
    that was found to end processes is refused, whichever of its sequences was the cause."""
    return fingerprint(dataclasses.replace(request, seed=0) if isinstance(request, Generate) else request)


@frozen
class Suspect:
    """A request that was at `place` when processes died. weight: of these deaths; last_death_s: of the monotonic clock
    in seconds."""

    place: int
    weight: int
    last_death_s: int

    @property
    def is_certain(self) -> bool:
        """Whether the deaths are enough to refuse it, if no other request is suspected as much."""
        return self.weight >= CERTAIN


class Ledger:
    """What is under way, by KV slot, and the suspects, in the field `ledger` of the board.

    words: the field, 64-bit words; entries of `LEDGER_ENTRY`: one for each KV slot, one for the request that is being
    admitted, and `SUSPECTS`
    """

    def __init__(self, words: memoryview) -> None:
        self._words = words
        self._width = len(LEDGER_ENTRY)
        self.slots = len(words) // self._width - SUSPECTS - 1

    def set(self, entry: int, *values: int) -> None:
        """Write the first words of an entry; the fingerprint comes last, so that a torn entry is an old one."""
        at = entry * self._width
        for place in reversed(range(len(values))):
            self._words[at + place] = values[place]

    def get(self, entry: int) -> tuple[int, ...]:
        """The words of an entry."""
        at = entry * self._width
        return tuple(self._words[at : at + self._width])

    @property
    def admission(self) -> int:
        """The entry of the request that is being admitted."""
        return self.slots

    def under_way(self) -> dict[int, list[int]]:
        """The places of what is under way, by fingerprint: several sequences may have the same."""
        places: dict[int, list[int]] = {}
        for entry in map(self.get, range(self.slots + 1)):
            if entry[FINGERPRINT]:
                places.setdefault(entry[FINGERPRINT], []).append(entry[PLACE])
        return places

    def clear(self) -> None:
        """Nothing is under way."""
        for entry in range(self.slots + 1):
            self.set(entry, 0)

    def suspects(self) -> dict[int, Suspect]:
        """Those of earlier coordinators."""
        entries = (self.get(self.slots + 1 + number) for number in range(SUSPECTS))
        return {entry[FINGERPRINT]: Suspect(*entry[PLACE:]) for entry in entries if entry[FINGERPRINT]}

    def keep(self, suspects: dict[int, Suspect]) -> None:
        """Write the suspects, the latest where there are more than places."""
        latest = sorted(suspects.items(), key=lambda item: -item[1].last_death_s)[:SUSPECTS]
        for number in range(SUSPECTS):
            values = (latest[number][0], *dataclasses.astuple(latest[number][1])) if number < len(latest) else (0,)
            self.set(self.slots + 1 + number, *values)


class Quarantine:
    """Which requests are suspected, and which are refused. Without sockets and clock.

    ledger: None keeps nothing, for a coordinator without predecessors
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self._ledger = ledger or Ledger(memoryview(bytearray(8 * len(LEDGER_ENTRY) * (SUSPECTS + 1))).cast("Q"))
        self._suspects = self._ledger.suspects()
        self._refused = 0  # requests found to be the cause of deaths, since `take_refused`

    @classmethod
    def after(cls, words: memoryview, *, killed: bool, now: float) -> Quarantine:
        """That of a coordinator whose predecessor left this ledger, if it had one. killed: by SIGKILL."""
        quarantine = cls(Ledger(words))
        quarantine.coordinator_died(killed=killed, now=now)
        return quarantine

    # ---- deaths ----------------------------------------------------------------------------------------------
    def coordinator_died(self, *, killed: bool, now: float) -> None:
        """Suspect what the predecessor had under way. killed: by SIGKILL."""
        self.died(self._ledger.under_way(), killed=killed, now=now)
        self._ledger.clear()

    def died(self, under_way: dict[int, list[int]], *, killed: bool, now: float) -> None:
        """A process died while these requests were under way, the sequences of each at their places."""
        weight = KILL_WEIGHT if killed else CRASH_WEIGHT
        for name, places in under_way.items():
            before = self._suspects.get(name)
            if before is not None and any(abs(before.place - place) <= SAME_PLACE_TOKENS for place in places):
                self._suspects[name] = Suspect(before.place, before.weight + weight, int(now))
            else:
                self._suspects[name] = Suspect(max(places), weight, int(now))
        self._forget(now)
        causes = self._certain(under_way)
        if len(causes) > 1:  # any of them may be it: each has to run without the others to be found guilty
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
        """How many requests were found to be the cause of deaths since this was last called. A request that is refused
        again is no new one: it must not have the supervisor forget deaths that it did not cause."""
        refused, self._refused = self._refused, 0
        return refused

    # ---- requests --------------------------------------------------------------------------------------------
    def is_refused(self, name: int, now: float) -> bool:
        """Whether a request ended processes and is not to be run."""
        suspect = self._suspects.get(name)
        return suspect is not None and suspect.is_certain and now - suspect.last_death_s < FORGET_AFTER_S

    def runs_apart(self, name: int) -> bool:
        """Whether a request runs while no other one of its kind does: the next death is to have one suspect."""
        suspect = self._suspects.get(name)
        return suspect is not None and suspect.weight >= CERTAIN - KILL_WEIGHT

    def admits(self, name: int) -> None:
        """The coordinator looks at a request that has no KV slot; 0 when it is done with that."""
        self._ledger.set(self._ledger.admission, name, 0)

    def computes(self, name: int, slot: int, place: int) -> None:
        """A step is sent for the request in this KV slot. place: 1 + the tokens whose keys and values are there."""
        self._ledger.set(slot, name, place)
        suspect = self._suspects.get(name)
        if suspect is not None and not suspect.is_certain and place > suspect.place + SAME_PLACE_TOKENS:
            del self._suspects[name]
            self._ledger.keep(self._suspects)

    def convict(self, name: int, now: float) -> None:
        """A request ended processes for certain: while they computed a step of it alone, say."""
        self._suspects[name] = Suspect(0, CERTAIN, int(now))
        self._refused += 1
        self._ledger.keep(self._suspects)

    def ends(self, name: int, slot: int) -> None:
        """A request has ended: it is under way no more, and suspected no more unless it is refused."""
        self._ledger.set(slot, 0)
        suspect = self._suspects.get(name)
        if suspect is not None and not suspect.is_certain:
            del self._suspects[name]
            self._ledger.keep(self._suspects)
