"""The tests of `bench` and their prompts: `pp512` reads a prompt of 512 tokens, `tg128` generates 128 tokens, and
`pp512+tg128` does both in one request.

Each repetition has its own prompt, because the weight cache is too favourable to a repeated one. The prompts of a
synthetic package come from a preset of its workload, those of any other package from the held-out part of the demo's
corpus, encoded by the package's tokenizer.
"""

from __future__ import annotations

import argparse
import itertools
import re
from array import array
from collections.abc import Iterator, Sequence

from neuronpipe.plans.demo.corpus import documents
from neuronpipe.plans.measure.benchmark_processes import BenchmarkProcess, measure_together
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from neuronpipe.services.coordinator.text.tokenizer import FileTokenizer

LEAD_TOKENS = 4  # length of the prompt of a test that only decodes
DEFAULT_PROMPT_TOKENS, DEFAULT_DECODE_TOKENS = 512, 128
DEFAULT_PRESET = "default"
MAX_CHARACTERS = 200_000  # of the corpus: more than any context holds


@frozen
class Case:
    """One test. A part with zero tokens is not measured."""

    name: str
    prefill_tokens: int
    decode_tokens: int

    @property
    def prompt_tokens(self) -> int:
        return self.prefill_tokens or LEAD_TOKENS

    @property
    def max_tokens(self) -> int:
        """Tokens to request. The first one comes with the prefill; each further one is a decode step."""
        return self.decode_tokens + 1

    @property
    def context_tokens(self) -> int:
        """Context that the request needs. A test that does not decode needs no room for its only token."""
        return self.prompt_tokens + (self.max_tokens if self.decode_tokens else 0)


def parse_cases(text: str) -> tuple[Case, ...]:
    """Parse a list of tests, e.g. `pp512,tg128,pp64+tg16`. For argparse: raises ArgumentTypeError."""
    cases = []
    for word in text.split(","):
        match = re.fullmatch(r"(?:pp([1-9]\d{0,6}))?(\+)?(?:tg([1-9]\d{0,6}))?", word.strip())
        if not match or not word.strip() or bool(match[2]) != bool(match[1] and match[3]):
            raise argparse.ArgumentTypeError(f"{word!r} is not a test; write pp512, tg128 or pp512+tg128")
        cases.append(Case(word.strip(), int(match[1] or 0), int(match[3] or 0)))
    return tuple(cases)


def default_cases(context_tokens: int) -> tuple[Case, ...]:
    """Return pp512 and tg128, or shorter tests if the context is shorter."""
    prompt = min(DEFAULT_PROMPT_TOKENS, context_tokens)
    decode = min(DEFAULT_DECODE_TOKENS, max(1, context_tokens - LEAD_TOKENS - 1))
    return Case(f"pp{prompt}", prompt, 0), Case(f"tg{decode}", 0, decode)


class Prompts:
    """The source of prompts.

    preset: a preset of the package's workload; None takes the default, if the package has a workload
    max_tokens: number of tokens of all prompts and answers together; None keeps the whole corpus. A run that is started
        later inherits this memory, so no more is kept

    Raises UserError if there is no such preset.
    """

    def __init__(self, package: Package, preset: str | None, max_tokens: int | None = None) -> None:
        workload = package.manifest.workload
        self.preset: str | None = None
        if workload is None:
            if preset is not None:
                raise UserError(f"--workload {preset}: {package.path} has no workload; `neuronpipe synth` makes some")
            self._tokens: Sequence[int] = _corpus_tokens(package, max_tokens)
            return
        self.preset = DEFAULT_PRESET if preset is None else preset
        if self.preset not in workload.presets:
            raise UserError(f"--workload {self.preset}: this package has {', '.join(sorted(workload.presets))}")
        first, tokens = workload.presets[self.preset]
        self._tokens = range(first, first + tokens)

    def take(self, number: int, length_tokens: int, room_tokens: int) -> tuple[int, ...]:
        """Return a prompt of `length_tokens`. Consecutive numbers give consecutive parts of the source, in a cycle.

        room_tokens: positions that prompt and answer take together
        """
        parts = max(1, len(self._tokens) // room_tokens)
        start = (number % parts) * room_tokens
        return tuple(itertools.islice(itertools.cycle(self._tokens), start, start + length_tokens))


def _corpus_tokens(package: Package, max_tokens: int | None) -> Sequence[int]:
    """Encode the corpus in a process of its own: all processes of the run would inherit the 20 MiB that this takes."""

    def encode(_: BenchmarkProcess) -> Iterator[Sequence[int]]:
        text = ""
        for document in documents(held_out=True):
            text += document
            if len(text) > MAX_CHARACTERS:
                break
        yield FileTokenizer(package.tokenizer()).encode(text[:MAX_CHARACTERS])[:max_tokens]

    [[tokens]] = measure_together([None], encode)
    if not tokens:
        raise UserError(
            f"{package.tokenizer_path}: makes no tokens of Python source text; there is nothing to measure with"
        )
    return array("I", map(int, tokens))
