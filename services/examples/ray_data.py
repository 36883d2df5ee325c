"""Complete or score many texts with Ray Data: a run on each actor, texts in batches.

    pip install neuronpipe "ray[data]"
    python -m neuronpipe.services.examples.ray_data complete PACKAGE TEXTS OUT --memory 8GiB --runs 4
    python -m neuronpipe.services.examples.ray_data perplexity PACKAGE TEXTS OUT --memory 8GiB --runs 4

TEXTS is a file or folder of JSON lines with a field `text`, OUT a folder. Each line gets `completion`, or `perplexity`
with `tokens`, the number of tokens that count: all but a text's first. An actor that is lost is replaced, and its
batches are computed again.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray.data
from neuronpipe.services.examples.owned_run import OwnedRun
from pydantic import ByteSize, TypeAdapter

BATCH_TEXTS = 16
_SIZE = TypeAdapter(ByteSize)
Batch = dict[str, Any]


class Texts:
    """An actor with a run of its own; called with a batch, it returns it with further columns.

    body: fields of `/v1/completions`
    """

    def __init__(self, package: str, memory: str, body: dict[str, Any], options: Sequence[str]) -> None:
        self._run = OwnedRun([package], memory, options)
        self._body = body

    def __call__(self, batch: Batch) -> Batch:
        prompts = [str(text) for text in batch["text"]]
        choices = self._run.post("/v1/completions", {**self._body, "prompt": prompts})["choices"]
        return batch | self.columns(choices)

    def columns(self, choices: Sequence[dict[str, Any]]) -> Batch:
        """Return the further columns of a batch, from one choice for each of its texts."""
        return {"completion": [choice["text"] for choice in choices]}

    def __del__(self) -> None:
        if hasattr(self, "_run"):
            self._run.end()


class ScoredTexts(Texts):
    """An actor that rates each token of a text."""

    def columns(self, choices: Sequence[dict[str, Any]]) -> Batch:
        scores = [choice["logprobs"]["token_logprobs"][1:] for choice in choices]
        means = [math.fsum(score) / len(score) if score else math.nan for score in scores]
        return {"perplexity": [math.exp(-mean) for mean in means], "tokens": [len(score) for score in scores]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", choices=("complete", "perplexity"))
    parser.add_argument("package")
    parser.add_argument("texts", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--memory", type=lambda text: int(_SIZE.validate_python(text)), required=True, help="of each run, such as 8GiB"
    )
    parser.add_argument("--runs", type=int, default=1, help="number of actors (default: %(default)s)")
    parser.add_argument("--cpus", type=float, default=1.0, help="cores of each (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of a completion (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="of completions (default: %(default)s)")
    parser.add_argument("--option", action="append", default=[], help="a further option of `neuronpipe serve`")
    words = parser.parse_args()
    scores = words.work == "perplexity"
    body: dict[str, Any] = {"max_tokens": words.max_tokens, "temperature": words.temperature, "seed": 0}
    if scores:
        body = {"echo": True, "logprobs": 0, "max_tokens": 0}
    ray.data.read_json(str(words.texts.resolve()), lines=True).map_batches(
        ScoredTexts if scores else Texts,
        fn_constructor_args=(words.package, str(words.memory), body, words.option),
        batch_size=BATCH_TEXTS,
        compute=ray.data.ActorPoolStrategy(size=words.runs),
        num_cpus=words.cpus,
        memory=words.memory,
    ).write_json(str(words.out.resolve()))


if __name__ == "__main__":
    main()
