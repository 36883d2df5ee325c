"""Prompts of several hundred tokens with common beginnings, of which a run has computed some before.

More of them are asked for than there are KV slots, so that slots are evicted and prompts come back from the prompt
cache. A client that asks the coordinator compares tokens and log-probabilities bit by bit. A client that streams over
HTTP asks for one or two random texts of a prompt with a seed.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from neuronpipe.services.loader.prefix_chunk import CHUNK_TOKENS

from tests.faults.streams import Stream
from tests.http_client import Server

BEGINNINGS, ENDS = 6, 4
BEGINNING_TOKENS, END_TOKENS, TURN_TOKENS = (200, 320), (5, 60), (5, 20)
TOKENS = 12
IDS = range(5, 1000)


class SharedPrompts:
    """The prompts, their texts where everything is computed, and two clients that return where theirs differ.

    happened: counts of answers: "hits", whose prompt was partly reused or restored, "chunks", of which that part is
        chunks of the prompt cache, so that it probably comes from disk, "forks" into two texts, "texts"
    """

    options = ("--ffn-resident", "50%", "--sequences", "3")
    max_delay_s = 5.0  # for several answers

    def __init__(self, server: Server, seed: int) -> None:
        self._run, self._draws = server.run, (random.Random(seed), random.Random(seed + 1))  # each has a thread
        self.happened = Counter[str]()
        fields = {"max_tokens": TOKENS, "temperature": 2.0, "ignore_eos": True}
        self.stream = Stream(server, **fields, stream_options={"include_usage": True})
        self._prompts, self._alone = list[list[int]](), list[dict[str, Any]]()
        draw = random.Random(seed)
        for _ in range(BEGINNINGS):
            beginning = draw.choices(IDS, k=draw.randint(*BEGINNING_TOKENS))
            for number in range(ENDS):
                kept = beginning[: draw.randint(BEGINNING_TOKENS[0] // 2, len(beginning))]
                prompt = [*kept, *draw.choices(IDS, k=draw.randint(*END_TOKENS))]
                if number == ENDS - 1:  # the next turn of a conversation
                    turn = draw.choices(IDS, k=draw.randint(*TURN_TOKENS))
                    prompt = [*self._prompts[-1], *self._alone[-1]["token_ids"], *turn]
                self._prompts.append(prompt)
                self._alone.append(self._answer(prompt))
        self._streamed = [
            self.stream.answer(prompt=prompt, seed=number, n=2, cache_prompt=False).texts
            for number, prompt in enumerate(self._prompts)
        ]
        assert all(first != second for first, second in self._streamed)

    def ask(self, seen: Callable[[], None]) -> list[str]:
        """Ask the coordinator for any of them, mostly with log-probabilities."""
        number, rated = self._draws[0].randrange(len(self._prompts)), self._draws[0].random() < 0.7
        options = {"share_prefix": True, "logprobs": 0 if rated else None}
        answer = self._answer(self._prompts[number], seen, **options)
        self._count(answer["cached_tokens"], 1)
        fields = ("token_ids", "logprobs") if rated else ("token_ids",)
        alone = self._alone[number]
        return [
            f"{name} of {number}: {answer[name]}, not {alone[name]}" for name in fields if answer[name] != alone[name]
        ]

    def over_http(self, seen: Callable[[], None]) -> list[str]:
        """Have one or two texts of any of them streamed."""
        number, texts = self._draws[1].randrange(len(self._prompts)), self._draws[1].randint(1, 2)
        answer = self.stream.answer(seen, prompt=self._prompts[number], seed=number, n=texts)
        self._count(answer.cached_tokens, texts)
        alone = self._streamed[number][:texts]
        return [] if answer.texts == alone else [f"{number}: {answer.texts}, not {alone}"]

    def _answer(self, prompt: list[int], seen: Callable[[], None] = lambda: None, **options: Any) -> dict[str, Any]:
        options = {"logprobs": 0, "ignore_end": True, **options}
        return self._run.ask(prompt, TOKENS, seen=lambda token: seen(), **options)

    def _count(self, cached_tokens: int, texts: int) -> None:
        is_hit, is_whole = cached_tokens > 0, cached_tokens % CHUNK_TOKENS == 0
        self.happened.update(hits=is_hit, chunks=is_hit and is_whole, forks=texts > 1, texts=texts)
