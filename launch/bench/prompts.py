"""Prompts to measure with, another one for each repetition: a cache that has just seen a text would flatter itself.

A synthetic package says which tokens walk through which preset of its workload. Any other one gets the held-out part of
the demo's corpus, cut at the tokens of the package's own tokenizer.
"""

from __future__ import annotations

import itertools

from neuronpipe.plans.demo.corpus import documents
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError
from neuronpipe.services.coordinator.detokenizer import FileTokenizer

DEFAULT_PRESET = "default"
MAX_CHARACTERS = 200_000  # of the corpus: more than any context takes


class Prompts:
    """`preset`: a name of the package's workload; None: its default, where it has one. Raises UserError when there is
    no such preset."""

    def __init__(self, package: Package, preset: str | None) -> None:
        workload = package.manifest.workload
        self.preset: str | None = None
        if workload is None:
            if preset is not None:
                raise UserError(f"--workload {preset}: {package.path} has no workload; `neuronpipe synth` makes some")
            self._tokens = _corpus_tokens(package)
            return
        self.preset = DEFAULT_PRESET if preset is None else preset
        if self.preset not in workload.presets:
            raise UserError(f"--workload {self.preset}: this package has {', '.join(sorted(workload.presets))}")
        first, tokens = workload.presets[self.preset]
        self._tokens = list(range(first, first + tokens))

    def take(self, number: int, length_tokens: int, room_tokens: int) -> tuple[int, ...]:
        """Prompt `number`, `length_tokens` long; `room_tokens`: positions that prompt and answer take together.
        Consecutive numbers give consecutive stretches of the text, from its start again when it is over."""
        stretches = max(1, len(self._tokens) // room_tokens)
        start = (number % stretches) * room_tokens
        return tuple(itertools.islice(itertools.cycle(self._tokens), start, start + length_tokens))


def _corpus_tokens(package: Package) -> list[int]:
    text = ""
    for document in documents(held_out=True):
        text += document
        if len(text) > MAX_CHARACTERS:
            break
    tokens = FileTokenizer(package.tokenizer()).encode(text[:MAX_CHARACTERS])
    if not tokens:
        raise UserError(f"{package.tokenizer_path}: makes no tokens of Python source text; nothing to measure with")
    return tokens
