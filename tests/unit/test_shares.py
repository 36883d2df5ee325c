"""Whose request gets the next KV slot, without a clock: the scheduler driven by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from neuronpipe.protocol.messages.client import Finished
from neuronpipe.protocol.messages.request import Generate
from neuronpipe.services.coordinator.scheduling.events import (
    Action,
    RequestReceived,
    SampleTokens,
    SendStep,
    Tell,
    TokensSampled,
)
from neuronpipe.services.coordinator.scheduling.scheduler import Scheduler

from tests.unit.test_coordinator_core import finish, make_scheduler


class Clients:
    """Owners that ask again as soon as an answer has come, each for so many texts at a time, of so many tokens."""

    def __init__(self, slots: int, **owners: tuple[int, int]) -> None:
        self.scheduler: Scheduler = make_scheduler(sequences=slots, context_tokens=400)
        self.tokens: Counter[str] = Counter()
        self.finished: list[str] = []
        self._owners = owners
        self._count = 0
        self._pending: list[Action] = []
        for owner, (texts, _) in owners.items():
            for _ in range(texts):
                self.ask(owner)

    def ask(self, owner: str) -> None:
        self._count += 1
        most = self._owners[owner][1]
        ask = Generate(request=f"{owner}-{self._count}", prompt="a", max_tokens=most, owner=owner, share_prefix=False)
        self._pending += self.scheduler.handle(RequestReceived(b"gateway", ask), 0.0)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            action = self._pending.pop(0)
            if isinstance(action, SendStep):
                self._pending += finish(self.scheduler, action.message)
            elif isinstance(action, SampleTokens):
                self._pending += self.scheduler.handle(TokensSampled(tuple(120 for _ in action.rows)), 1.0)
            elif isinstance(action, Tell) and isinstance(action.message, Finished):
                owner = action.message.request.partition("-")[0]
                self.finished.append(owner)
                self.tokens[owner] += action.message.tokens
                self.ask(owner)


def test_who_asks_for_one_text_waits_for_one_of_the_many_and_not_for_all() -> None:
    clients = Clients(1, many=(60, 4))
    clients.run(40)
    clients._owners["one"] = (1, 4)
    before = len(clients.finished)
    clients.ask("one")
    clients.run(60)
    assert clients.finished[before:].index("one") <= 1


@pytest.mark.parametrize(
    ("slots", "many", "few"),
    [(1, (40, 4), (1, 4)), (2, (40, 4), (2, 4)), (1, (40, 4), (2, 40)), (4, (30, 30), (8, 3)), (3, (40, 5), (8, 5))],
    ids=["in turn", "two slots", "long texts", "short texts", "an odd slot"],
)
def test_two_owners_get_equal_shares_of_the_tokens(slots: int, many: tuple[int, int], few: tuple[int, int]) -> None:
    clients = Clients(slots, many=many, few=few)
    clients.run(8000)
    assert clients.tokens["many"] == pytest.approx(clients.tokens["few"], rel=0.1)


def test_a_third_owner_has_no_claim_on_the_time_before_it_came() -> None:
    clients = Clients(1, a=(4, 4), b=(4, 4))
    clients.run(2000)
    clients._owners["c"] = (4, 4)
    for _ in range(4):
        clients.ask("c")
    clients.tokens.clear()
    clients.run(2000)
    shares: Sequence[int] = [clients.tokens[owner] for owner in "abc"]
    assert max(shares) <= 1.1 * min(shares)


def test_requests_of_one_owner_keep_their_order() -> None:
    scheduler = make_scheduler(sequences=1, context_tokens=400)
    pending: list[Action] = []
    for number in range(3):
        ask = Generate(request=str(number), prompt="a", max_tokens=1)
        pending += scheduler.handle(RequestReceived(b"c", ask), 0.0)
    order = []
    while pending:
        action = pending.pop(0)
        if isinstance(action, SendStep):
            pending += finish(scheduler, action.message)
        elif isinstance(action, SampleTokens):
            pending += scheduler.handle(TokensSampled(tuple(120 for _ in action.rows)), 1.0)
        elif isinstance(action, Tell) and isinstance(action.message, Finished):
            order.append(action.message.request)
    assert order == ["0", "1", "2"]
