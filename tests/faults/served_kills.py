"""Kills of every process of a served run, coordinator and gateway among them, while two clients ask over and over.

One client asks the coordinator, one the gateway, which streams. Every text must be that of an undisturbed run. A stream
may break where the gateway was killed, nowhere else, and what came of it must be how the text begins. Afterwards the
processes must have open what they had before.
"""

from __future__ import annotations

from typing import NamedTuple

from neuronpipe.launch.planning import DEMO

from tests.faults.kills import PROCESSES, Generations, asking, grown, kill_at_random, open_things
from tests.faults.streams import Stream
from tests.http_client import served
from tests.pipeline import Shell, eventually

PROMPT, TOKENS = [1, 200, 300], 120
SERVED = [*PROCESSES, ("gateway", 0)]
OPTIONS = ("--ffn-resident", "30%", "--workers", "2", "--sequences", "2")  # so slow that a kill hits anything


class Survived(NamedTuple):
    """What came of it. took: by role, seconds from each kill until both clients had their next token."""

    took: dict[str, list[float]]
    texts: int
    streams: int
    broken: int
    refused: int


def survive(shell: Shell, kills: int, seed: int) -> Survived:
    """Raises AssertionError when a text differs, a stream breaks without a reason, or something is left."""
    with served(shell, DEMO, *OPTIONS) as server:
        run, stream = server.run, Stream(server, prompt=PROMPT, max_tokens=TOKENS)
        alone, streamed = run.ask(PROMPT, TOKENS)["token_ids"], stream()
        before = open_things(shell, run)
        with Generations(asking(run, PROMPT, TOKENS), alone) as texts, Generations(stream, streamed) as streams:
            took = kill_at_random(run, (texts, streams), kills, seed, SERVED)
        assert texts.failure is None, texts.failure
        assert streams.failure is None, streams.failure
        assert stream.broken <= len(took.get("gateway", [])), f"{stream.broken} streams broke"
        assert texts.answers > 0
        assert streams.answers > 0
        assert eventually(lambda: run.status().ready)
        assert eventually(lambda: not grown(before, open_things(shell, run))), grown(before, open_things(shell, run))
    assert eventually(lambda: not shell.leftovers()), shell.leftovers()
    return Survived(took, texts.answers, streams.answers, stream.broken, stream.refused)
