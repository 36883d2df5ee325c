"""Kills of every process of a served run, coordinator and gateway among them, while two clients ask over and over.

One client asks the coordinator, one the gateway, which streams. Every text must be that of an undisturbed run. A stream
may break where the gateway was killed, nowhere else, and what came of it must be how the text begins. Afterwards the
processes must have open what they had before. The clients ask for one text, or for prompts with common beginnings.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

from neuronpipe.launch.planning import DEMO

from tests.faults.kills import MAX_DELAY_S, PROCESSES, Generations, Kill, asking, grown, kill_at_random, open_things
from tests.faults.shared_prompts import SharedPrompts
from tests.faults.streams import Stream
from tests.http_client import Server, served
from tests.pipeline import Shell, eventually

PROMPT, TOKENS = [1, 200, 300], 120
SERVED = [*PROCESSES, ("gateway", 0)]


class OneText:
    """Two clients that want the same text over and over."""

    options = ("--ffn-resident", "30%", "--sequences", "2")  # so slow that a kill hits anything
    max_delay_s = MAX_DELAY_S

    def __init__(self, server: Server, seed: int) -> None:
        self.ask = asking(server.run, PROMPT, TOKENS)
        self.stream = Stream(server, prompt=PROMPT, max_tokens=TOKENS)
        self.over_http = self.stream
        self.happened = Counter[str]()


class Survived(NamedTuple):
    """What came of it.

    happened: what the clients have counted, such as prompts that were reused
    """

    kills: list[Kill]
    texts: int
    streams: int
    broken: int
    refused: int
    happened: Counter[str]

    def took_s(self) -> dict[str, list[float]]:
        """Return for each role the seconds from each kill until both clients had their next token."""
        roles = sorted({kill.role for kill in self.kills})
        return {role: [kill.took_s for kill in self.kills if kill.role == role] for role in roles}


def survive(
    shell: Shell,
    kills: int,
    seed: int,
    clients: type[OneText] | type[SharedPrompts] = OneText,
    package: Path = DEMO,
    *,
    notices: bool = False,
) -> Survived:
    """Raises AssertionError when a text differs, a stream breaks without a reason, or something is left.

    notices: as in `served`
    """
    with served(shell, package, "--workers", "2", *clients.options, notices=notices) as server:
        run, both = server.run, clients(server, seed)
        alone, streamed = both.ask(lambda: None), both.over_http(lambda: None)
        before = open_things(shell, run)
        both.happened.clear()
        with Generations(both.ask, alone) as texts, Generations(both.over_http, streamed) as streams:
            killed = kill_at_random(run, (texts, streams), kills, seed, SERVED, clients.max_delay_s)
        broken, refused = both.stream.broken, both.stream.refused
        assert texts.failure is None, texts.failure
        assert streams.failure is None, streams.failure
        assert broken <= sum(kill.role == "gateway" for kill in killed), f"{broken} streams broke"
        assert texts.answers > 0
        assert streams.answers > 0
        assert eventually(lambda: run.status().ready)
        assert eventually(lambda: not grown(before, open_things(shell, run))), grown(before, open_things(shell, run))
    assert eventually(lambda: not shell.leftovers()), shell.leftovers()
    return Survived(killed, texts.answers, streams.answers, broken, refused, both.happened)
