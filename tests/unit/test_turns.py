"""Who waits, in turns."""

from __future__ import annotations

from neuronpipe.services.gateway.client.fair_queue import FairQueue


def test_owners_take_turns_and_keep_their_own_order() -> None:
    turns: FairQueue[str, int] = FairQueue()
    turns.add("a", [1, 2, 3])
    turns.add("b", [11])
    turns.add("c", [21, 22])
    assert [turns.take() for _ in range(7)] == [1, 11, 21, 2, 22, 3, None]


def test_what_is_put_back_is_its_owners_next_and_what_is_dropped_does_not_come() -> None:
    turns: FairQueue[str, int] = FairQueue()
    turns.add("a", [1, 2])
    turns.add("b", [11, 12])
    first = turns.take()
    assert first == 1
    turns.put_back("a", first)
    turns.drop("b")
    assert ("a" in turns, "b" in turns, len(turns)) == (True, False, 2)
    assert [turns.take(), turns.take(), turns.take()] == [1, 2, None]


def test_the_client_with_the_fewest_texts_under_way_sends_the_next_one() -> None:
    turns: FairQueue[str, int] = FairQueue()
    turns.add("a", range(6), client="one")
    assert [turns.take() for _ in range(4)] == [0, 1, 2, 3]
    turns.add("b", [10, 11], client="another")
    assert turns.next_client_is_idle
    assert [turns.take(), turns.take()] == [10, 11]
    turns.release("one")
    turns.add("c", [12], client="another")
    assert not turns.next_client_is_idle
    assert turns.take() == 12  # two under way, the other three
    turns.release("one")
    assert turns.take() == 4


def test_requests_of_one_client_take_turns_within_its_share() -> None:
    turns: FairQueue[str, int] = FairQueue()
    turns.add("a", [1, 2, 3], client="one")
    turns.add("b", [11], client="one")
    turns.add("c", [21, 22, 23], client="another")
    assert [turns.take() for _ in range(7)] == [1, 21, 11, 22, 2, 23, 3]
