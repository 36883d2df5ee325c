"""Which packages have a run, of those that are served within one limit."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st
from neuronpipe.services.gateway.runs.run_pool import Order, RunPool

START, END = "start", "end"


def pool(limit_bytes: int = 100, keep_alive_s: float = math.inf, **takes_bytes: int) -> RunPool:
    return RunPool(takes_bytes, limit_bytes, keep_alive_s)


def with_runs(made: RunPool, *names: str) -> RunPool:
    """These runs are live, the first one unused for longest."""
    for now, name in enumerate(names):
        made.request(name)
        assert made.orders(now) == [Order(START, name)]
        made.started(name, now)
    return made


def test_a_run_is_started_once_for_all_who_want_it() -> None:
    one = pool(a=10)
    one.request("a")
    one.request("a")
    assert one.orders(0) == [Order(START, "a")]
    one.request("a")
    assert one.orders(0) == []


def test_what_fits_stands_side_by_side() -> None:
    one = with_runs(pool(a=40, b=60), "a", "b")
    assert (one.state("a"), one.state("b")) == ("live", "live")


def test_a_run_without_requests_is_dismissed_at_once() -> None:
    one = with_runs(pool(a=40, b=60), "a", "b")
    one.acquire("a")
    assert not one.dismiss("a")
    assert one.dismiss("b")
    assert one.orders(0) == [Order(END, "b")]
    assert one.dismiss("b")  # once more changes nothing
    one.request("b")
    assert not one.dismiss("b")
    one.ended("b")
    assert one.orders(0) == [Order(START, "b")]
    assert not one.dismiss("b")
    one.started("b", 1)
    one.release("a", 2)
    assert one.dismiss("a")
    assert one.orders(2) == [Order(END, "a")]


def test_room_is_made_by_the_run_that_was_used_least_recently() -> None:
    one = with_runs(pool(a=40, b=40, c=40), "a", "b")
    one.acquire("a")
    one.release("a", 5)
    one.request("c")
    assert one.orders(6) == [Order(END, "b")]
    assert one.orders(6) == []  # its memory is still taken
    one.ended("b")
    assert one.orders(7) == [Order(START, "c")]


def test_a_run_that_nobody_uses_goes_before_one_in_use() -> None:
    one = with_runs(pool(a=50, b=50, c=50), "a", "b")
    one.acquire("a")
    one.request("c")
    assert one.orders(6) == [Order(END, "b")]


def test_texts_are_not_broken_off_and_later_ones_wait_for_their_turn() -> None:
    one = with_runs(pool(a=100, b=100), "a")
    one.acquire("a")
    one.request("b")
    assert one.orders(1) == []
    assert one.state("a") == "leaving"  # so whoever comes for it now waits as well
    one.request("a")
    one.release("a", 2)
    assert one.orders(2) == [Order(END, "a")]
    one.ended("a")
    assert one.orders(3) == [Order(START, "b")]
    one.started("b", 4)
    one.acquire("b")
    assert one.orders(4) == []
    one.release("b", 5)
    assert one.orders(5) == [Order(END, "b")]
    one.ended("b")
    assert one.orders(6) == [Order(START, "a")]


def test_a_run_that_nobody_uses_for_long_is_ended() -> None:
    one = with_runs(pool(keep_alive_s=30, a=10), "a")
    one.acquire("a")
    one.release("a", 10)
    assert one.due_at() == 40
    assert one.orders(39) == []
    assert one.orders(40) == [Order(END, "a")]
    assert one.due_at() == math.inf


def test_the_time_that_an_unused_run_has_left_counts_from_its_last_request() -> None:
    one = with_runs(pool(keep_alive_s=30, a=10, b=10), "a")
    one.acquire("a")
    assert one.unused_for_s("a", 5) == 30
    one.release("a", 10)
    assert [one.unused_for_s("a", now) for now in (10, 25, 50)] == [30, 15, 0]
    one.starting("b")
    assert one.unused_for_s("b", 50) == 30


def test_a_text_that_takes_longer_than_that_keeps_its_run() -> None:
    one = with_runs(pool(keep_alive_s=30, a=10), "a")
    one.acquire("a")
    assert one.due_at() == math.inf
    assert one.orders(1000) == []


def test_a_run_larger_than_the_limit_has_the_memory_for_itself() -> None:
    one = with_runs(pool(a=300, b=10), "a")
    one.request("b")
    assert one.orders(1) == [Order(END, "a")]


def test_what_nobody_waits_for_any_more_is_not_started() -> None:
    one = with_runs(pool(a=100, b=100), "a")
    one.acquire("a")
    one.request("b")
    one.orders(1)
    one.withdraw("b")
    one.release("a", 2)
    one.orders(2)
    one.ended("a")
    assert one.orders(3) == []


def test_a_gateway_that_was_started_again_takes_over_the_runs_that_are_live() -> None:
    one = pool(a=100, b=100)
    one.starting("a")
    one.started("a", 0)
    one.request("b")
    assert one.orders(1) == [Order(END, "a")]


SIZES = st.lists(st.integers(1, 60), min_size=2, max_size=5)
STEPS = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(["ask", "answer", "begun", "gone", "crash"])), max_size=60
)


@given(sizes=SIZES, steps=STEPS)
def test_the_limit_holds_and_everybody_gets_a_turn(sizes: list[int], steps: list[tuple[int, str]]) -> None:
    """Requests come and go in any order, runs take their time to begin and end, and some die. Each request holds its
    run as soon as that is live, and in the end all have had theirs."""
    names = [f"m{number}" for number in range(len(sizes))]
    one = RunPool(dict(zip(names, sizes, strict=True)), 100, math.inf)
    waiting, holding = dict.fromkeys(names, 0), dict.fromkeys(names, 0)
    beginning, ending = set[str](), set[str]()

    def carry_out() -> None:
        for act, name in one.orders(0):
            assert not (act == END and holding[name]), "a text was broken off"
            (beginning if act == START else ending).add(name)
        held = [size for name, size in zip(names, sizes, strict=True) if one.state(name) != "asleep"]
        assert sum(held) <= 100 or len(held) == 1

    def act(name: str, what: str) -> None:
        if what == "ask" and one.state(name) == "live":
            one.acquire(name)
            holding[name] += 1
        elif what == "ask":
            one.request(name)
            waiting[name] += 1
        elif what == "answer" and holding[name]:
            holding[name] -= 1
            one.release(name, 0)
        elif what == "begun" and name in beginning:
            beginning.remove(name)
            one.started(name, 0)
            for _ in range(waiting[name]):
                one.acquire(name)
            holding[name], waiting[name] = holding[name] + waiting[name], 0
        elif what == "gone" and name in ending:
            ending.remove(name)
            one.ended(name)
        elif what == "crash" and name in beginning:
            beginning.remove(name)
            one.ended(name)
            waiting[name] = 0  # they are told
        carry_out()

    for number, what in steps:
        act(names[number % len(names)], what)
    for _ in range(20 * len(names)):
        for name in names:
            for what in ("begun", "answer", "gone"):
                act(name, what)
    assert not any(waiting.values())
