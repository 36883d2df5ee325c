"""The same bits whoever computes, whatever is resident and whatever else is asked: tokens and logits of whole runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.reference.engine import ReferenceEngine

from tests.conformance.checkpoints import RECIPES, tokens
from tests.pipeline import Run, Shell

Converted = Callable[..., Package]
CHUNK = 64
PROMPTS = ([7], tokens(RECIPES["awkward"], 5), tokens(RECIPES["awkward"], CHUNK + 3))
TEXT = "and then there was rain on the thin roof, as there had been in the other house when all of them were still here"


def answers(run: Run, prompts: Sequence[list[int]] = PROMPTS, most: int = 6) -> list[list[int]]:
    """Greedy tokens after each prompt."""
    return [run.ask(prompt, most)["token_ids"] for prompt in prompts]


def least_memory(shell: Shell, package: Package, *options: str) -> int:
    """The least that the refusal of too small a limit names."""
    said = shell.refused("plan", package.path, "--memory", "1048576", *options)
    return int(said.split("the least for this package is ")[1].split(" bytes")[0])


@pytest.fixture(scope="module")
def undisturbed(long_shell: Shell, converted: Converted) -> list[list[int]]:
    """What the awkward model says with one worker and everything resident."""
    with long_shell.up(converted("awkward", "q8").path, "--workers", "1") as run:
        return answers(run)


@pytest.mark.parametrize("workers", [pytest.param("2", marks=pytest.mark.nightly), "3"])
def test_any_number_of_workers_says_the_same(
    shell: Shell, converted: Converted, undisturbed: list[list[int]], workers: str
) -> None:
    with shell.up(converted("awkward", "q8").path, "--workers", workers) as run:
        assert [answers(run) for _ in range(3)] == 3 * [undisturbed]


@pytest.mark.parametrize(
    ("workers", "share"), [("1", 0.0), ("2", 0.3), pytest.param("3", 0.0, marks=pytest.mark.nightly)]
)
def test_any_memory_down_to_the_least_says_the_same(
    shell: Shell, converted: Converted, undisturbed: list[list[int]], workers: str, share: float
) -> None:
    package = converted("awkward", "q8")
    least = least_memory(shell, package, "--workers", workers, "--sequences", "1")
    memory = least + int(share * package.manifest.files["bundles.bin"].bytes)
    options = ("--workers", workers, "--sequences", "1", "--memory", str(memory))
    with shell.up(package.path, *options) as run:
        asked = run.ask(PROMPTS[1], 6)
        assert asked["flash"]["bytes"] > 0
        assert [asked["token_ids"], run.ask(PROMPTS[0], 6)["token_ids"]] == [undisturbed[1], undisturbed[0]]
    refused = shell.refused("plan", package.path, *options[:-1], str(least - 1))
    assert f"{least} bytes" in refused


@pytest.mark.parametrize("share", [pytest.param("50%", marks=pytest.mark.nightly), "10%"])
def test_a_share_of_the_neurons_says_the_same_and_reads_flash(
    shell: Shell, converted: Converted, undisturbed: list[list[int]], share: str
) -> None:
    with shell.up(converted("awkward", "q8").path, "--ffn-resident", share) as run:
        asked = [run.ask(prompt, 6) for prompt in PROMPTS]
    assert [a["token_ids"] for a in asked] == undisturbed
    assert all(a["flash"]["bytes"] > 0 and a["flash"]["reads"] > 0 and a["flash"]["miss_rate"] > 0 for a in asked)


@pytest.mark.parametrize("without", ["pipeline", "bundle,cache,pipeline,prefetch"])
def test_techniques_taken_away_cost_time_and_change_nothing(
    shell: Shell, converted: Converted, undisturbed: list[list[int]], without: str
) -> None:
    options = ("--workers", "2", "--ffn-resident", "30%", "--without", without)
    with shell.up(converted("awkward", "q8").path, *options) as run:
        assert answers(run) == undisturbed


KINDS = [
    ("qwen2", "q4k", None),  # silu, biases, tied embeddings; down in q5k, embedding in q6k
    ("awkward", "q5k", None),
    ("awkward", "iq4", None),
    ("qwen2", "mxfp4", None),
    ("awkward", "q5h", None),
    ("relu2", "f16", "drelu"),  # no multiple of 32 in a row of queries: f16 only
    ("bamboo", "q8", "drelu"),  # a sliding window
    ("bamboo", "f16", "silu"),
    ("gemma2", "f16", None),  # norms before and after, caps, gelu
    ("gemma3", "q4", None),  # two tables of positions
    ("gemma4", "f16", None),  # heads that differ between layers
    ("gemma4 moe", "q8", None),  # values from keys, norms of branches
    ("olmo3", "q8", None),  # norms after
    # Each recipe and each quantization of these is among those above, or in the other tests here.
    *(
        pytest.param(*case, None, marks=pytest.mark.nightly)
        for case in (
            *(("awkward", quantization) for quantization in ("f16", "q4", "q8")),
            *(("qwen2", quantization) for quantization in ("f16", "q4")),
            ("relu2", "f16"),
            ("olmo2", "f16"),
        )
    ),
]


@pytest.mark.parametrize(("recipe", "quantization", "activation"), KINDS)
def test_every_kind_of_model_says_what_the_reference_engine_says(
    shell: Shell, converted: Converted, recipe: str, quantization: str, activation: str | None
) -> None:
    package = converted(recipe, quantization, activation)
    engine, prompt = ReferenceEngine(package), tokens(RECIPES[recipe], 20)
    with shell.up(package.path, "--ffn-resident", "40%") as run:
        said = run.ask(prompt, 8)["token_ids"]
    logits = engine.run([*prompt, *said[:-1]]).logits[len(prompt) - 1 :]
    if quantization == "f16":
        assert said == logits.argmax(axis=1).tolist()
    else:  # there the engine quantizes activations too: the tokens it takes are at least nearly the likeliest
        chosen = logits[np.arange(len(said)), said]
        assert (logits.max(axis=1) - chosen < 0.05 * np.abs(logits).max()).all()


@pytest.mark.parametrize("recipe", [pytest.param("gemma3", marks=pytest.mark.nightly), "gemma4 moe", "olmo2"])
def test_norms_of_outputs_are_the_same_for_every_number_of_workers_and_any_memory(
    shell: Shell, converted: Converted, recipe: str
) -> None:
    package = converted(recipe, "q8")
    prompts = [[7], tokens(RECIPES[recipe], 5), (2 * tokens(RECIPES[recipe], 40))[: CHUNK + 3]]
    with shell.up(package.path, "--workers", "1", "--sequences", "3") as run:
        alone = answers(run, prompts)
        together: list[Any] = [None, None, None]

        def ask(number: int) -> None:
            together[number] = run.ask(prompts[number], 6)["token_ids"]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert together == alone
    options = ("--workers", "3", "--sequences", "1")
    least = least_memory(shell, package, *options)
    with shell.up(package.path, *options, "--memory", str(least)) as run:
        assert answers(run, prompts) == alone


@pytest.fixture(scope="module")
def bamboo(long_shell: Shell, converted: Converted) -> Iterator[Run]:
    with long_shell.up(converted("bamboo", "f16").path, "--ffn-resident", "50%") as run:
        yield run


@pytest.mark.parametrize("count", [1, CHUNK, CHUNK + 1, 128])
def test_prompts_of_every_length(bamboo: Run, converted: Converted, count: int) -> None:
    package = converted("bamboo", "f16")
    prompt = (4 * tokens(RECIPES["bamboo"], 40))[:count]
    said = bamboo.ask(prompt, 3)
    assert said["prompt_tokens"] == count
    assert said["reason"] == ("context" if count == package.manifest.model.context_tokens else "length")
    reference = ReferenceEngine(package).run([*prompt, *said["token_ids"][:-1]]).logits
    assert said["token_ids"] == reference[count - 1 :].argmax(axis=1).tolist()


@pytest.mark.parametrize("options", [pytest.param((), marks=pytest.mark.nightly), ("--ffn-resident", "30%")])
def test_three_texts_at_once_say_what_each_says_alone(
    shell: Shell, converted: Converted, options: tuple[str, ...]
) -> None:
    prompts = [tokens(RECIPES["awkward"], count) for count in (3, 17, 40)]
    with shell.up(converted("awkward", "q4").path, "--sequences", "3", *options) as run:
        alone = answers(run, prompts, 16)
        together: list[Any] = [None, None, None]
        batches = []

        def ask(number: int) -> None:
            together[number] = run.ask(
                prompts[number], 16, seen=lambda _: batches.append(run.status().sequences_active)
            )["token_ids"]

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert together == alone
    assert max(batches) == 3


def logits_file(shell: Shell, package: Package, name: str, *options: str) -> tuple[bytes, dict[str, Any]]:
    text, out = shell.folder / "text", shell.folder / name
    text.write_text(TEXT)
    said = shell.json("perplexity", package.path, "--text", text, "-o", out, *options)
    logits = np.load(out)
    assert logits.dtype == np.float32
    assert logits.shape == (said["tokens"], package.manifest.model.vocabulary)
    return logits.tobytes(), said


@pytest.mark.parametrize(
    ("recipe", "quantization", "gates"),
    [
        ("awkward", "q4", "q3"),
        ("qwen2", "f16", None),
        *(pytest.param("awkward", name, None, marks=pytest.mark.nightly) for name in ("q4", "q4k")),
    ],
)
def test_logits_are_the_same_bits_on_both_paths_and_in_any_memory(
    shell: Shell, converted: Converted, recipe: str, quantization: str, gates: str | None
) -> None:
    package = converted(recipe, quantization, gates=gates)
    decode, said = logits_file(shell, package, "decode")
    prefill, _ = logits_file(shell, package, "prefill", "--path", "prefill", "--ffn-resident", "25%")
    little, _ = logits_file(shell, package, "little", "--ffn-resident", "60%", "--workers", "3")
    assert prefill == decode
    assert little == decode
    _check_perplexity(np.frombuffer(decode, np.float32), said, package, shell.folder / "text")


def _check_perplexity(logits: np.ndarray, said: dict[str, Any], package: Package, text: Path) -> None:
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(str(package.tokenizer_path)).encode(text.read_text()).ids
    rows = logits.reshape(len(ids), -1)[:-1].astype(np.float64)
    shifted = rows - rows.max(axis=1, keepdims=True)
    nll = np.log(np.exp(shifted).sum(axis=1)) - shifted[np.arange(len(rows)), ids[1:]]
    assert said["nll"] == pytest.approx(nll.mean(), abs=1e-4)
    assert said["perplexity"] == pytest.approx(np.exp(nll.mean()), rel=1e-4)
    assert said["tokens"] == len(ids)
