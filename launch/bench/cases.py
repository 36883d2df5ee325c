"""What is measured, and on which text: `pp512` is a prompt of 512 tokens, `tg128` 128 generated tokens, `pp512+tg128`
both in one request.

Each repetition has another prompt: a cache that has just seen a text would look too good. A synthetic package says
which tokens walk through which preset of its workload. Any other one gets the held-out part of the demo's corpus, cut
at the tokens of the package's own tokenizer.
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

LEAD_TOKENS = 4  # before the tokens that `tg` counts: a text must begin with something
DEFAULT_PROMPT_TOKENS, DEFAULT_DECODE_TOKENS = 512, 128
DEFAULT_PRESET = "default"
MAX_CHARACTERS = 200_000  # of the corpus: more than any context takes


@frozen
class Case:
    """One test. Zero tokens: that part is not measured."""

    name: str
    prefill_tokens: int
    decode_tokens: int

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt that the request carries."""
        return self.prefill_tokens or LEAD_TOKENS

    @property
    def max_tokens(self) -> int:
        """Tokens to ask for: the first one comes with the prefill, the gaps after it are decode steps."""
        return self.decode_tokens + 1

    @property
    def context_tokens(self) -> int:
        """Tokens of the request's whole text. Where nothing is decoded, the one that comes with the prefill needs no
        room."""
        return self.prompt_tokens + (self.max_tokens if self.decode_tokens else 0)


def parse_cases(text: str) -> tuple[Case, ...]:
    """`pp512,tg128,pp64+tg16`. For argparse: raises ArgumentTypeError."""
    cases = []
    for word in text.split(","):
        found = re.fullmatch(r"(?:pp([1-9]\d{0,6}))?(\+)?(?:tg([1-9]\d{0,6}))?", word.strip())
        if not found or not word.strip() or bool(found[2]) != bool(found[1] and found[3]):
            raise argparse.ArgumentTypeError(f"{word!r} is no test; write pp512, tg128 or pp512+tg128")
        cases.append(Case(word.strip(), int(found[1] or 0), int(found[3] or 0)))
    return tuple(cases)


def default_cases(context_tokens: int) -> tuple[Case, ...]:
    """pp512 and tg128, or what a shorter context holds."""
    prompt = min(DEFAULT_PROMPT_TOKENS, context_tokens)
    decode = min(DEFAULT_DECODE_TOKENS, max(1, context_tokens - LEAD_TOKENS - 1))
    return Case(f"pp{prompt}", prompt, 0), Case(f"tg{decode}", 0, decode)


class Prompts:
    """`preset`: a name of the package's workload; None: its default, where it has one. text_tokens: of all texts that
    will be taken together; no more is kept of a corpus, since a run that starts later inherits it. None: all there is.
    Raises UserError when there is no such preset."""

    def __init__(self, package: Package, preset: str | None, text_tokens: int | None = None) -> None:
        workload = package.manifest.workload
        self.preset: str | None = None
        if workload is None:
            if preset is not None:
                raise UserError(f"--workload {preset}: {package.path} has no workload; `neuronpipe synth` makes some")
            self._tokens: Sequence[int] = _corpus_tokens(package, text_tokens)
            return
        self.preset = DEFAULT_PRESET if preset is None else preset
        if self.preset not in workload.presets:
            raise UserError(f"--workload {self.preset}: this package has {', '.join(sorted(workload.presets))}")
        first, tokens = workload.presets[self.preset]
        self._tokens = range(first, first + tokens)

    def take(self, number: int, length_tokens: int, room_tokens: int) -> tuple[int, ...]:
        """Prompt `number`, `length_tokens` long; `room_tokens`: positions that prompt and answer take together.
        Consecutive numbers give consecutive stretches of the text, from its start again when it is over."""
        stretches = max(1, len(self._tokens) // room_tokens)
        start = (number % stretches) * room_tokens
        return tuple(itertools.islice(itertools.cycle(self._tokens), start, start + length_tokens))


def _corpus_tokens(package: Package, most: int | None) -> Sequence[int]:
    """In a process of its own: it takes 20 MiB, which all processes of the run would inherit, and which would count in
    the run's memory."""

    def encoded(_: BenchmarkProcess) -> Iterator[Sequence[int]]:
        text = ""
        for document in documents(held_out=True):
            text += document
            if len(text) > MAX_CHARACTERS:
                break
        yield FileTokenizer(package.tokenizer()).encode(text[:MAX_CHARACTERS])[:most]

    [[tokens]] = measure_together([None], encoded)
    if not tokens:
        raise UserError(f"{package.tokenizer_path}: makes no tokens of Python source text; nothing to measure with")
    return array("I", map(int, tokens))
