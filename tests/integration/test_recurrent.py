"""Models with recurrent layers through the whole pipeline: states survive kills, and snapshots spare computing."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.reference.engine import ReferenceEngine
from neuronpipe.protocol.messages.client import Token
from neuronpipe.protocol.messages.request import Bias

from tests.conformance.checkpoints import RECIPES, tokens, write_checkpoint
from tests.pipeline import Shell

Converted = Callable[..., Package]
MAX_TOKENS = 10
KINDS = ("qwen3.5 moe", "qwen3 next", "lfm2 moe", "nemotron-h moe", "kimi linear")


def greedy(package: Package, prompt: list[int], max_tokens: int = MAX_TOKENS) -> list[int]:
    """The reference engine's most likely tokens."""
    text, engine = list(prompt), ReferenceEngine(package)
    for _ in range(max_tokens):
        text.append(int(engine.run(text).logits[-1].argmax()))
    return text[len(prompt) :]


@pytest.mark.parametrize("kind", KINDS)
def test_several_sequences_share_prefixes_in_small_memory(kind: str, shell: Shell, converted: Converted) -> None:
    package, prompt = converted(kind, "f16"), tokens(RECIPES[kind], 40)
    prompts = [prompt, [*prompt[:30], 7], [*prompt[:20], 8, 9], prompt[:12]]
    expected = [greedy(package, one) for one in prompts]
    with shell.up(package.path, "--ffn-resident", "40%", "--workers", "2", "--sequences", "4") as run:
        with ThreadPoolExecutor(len(prompts)) as threads:
            at_once = list(threads.map(lambda one: run.ask(one, MAX_TOKENS), prompts))
        assert [answer["token_ids"] for answer in at_once] == expected
        shared = [run.ask(one, MAX_TOKENS, share_prefix=True) for one in prompts]
        assert [answer["token_ids"] for answer in shared] == expected


def test_a_conversation_goes_on_from_the_state_of_its_last_turn(shell: Shell, converted: Converted) -> None:
    package, prompt = converted("qwen3.5", "f16"), tokens(RECIPES["qwen3.5"], 40)
    with shell.up(package.path, "--sequences", "2") as run:
        first = run.ask(prompt, 4, share_prefix=True)
        assert first["cached_tokens"] == 0
        turn = [*prompt, *first["token_ids"], 11, 12, 13]
        second = run.ask(turn, MAX_TOKENS, share_prefix=True)
        # The last token of an answer is not computed any more.
        assert second["cached_tokens"] == len(prompt) + 3
        assert second["token_ids"] == greedy(package, turn)
        other = [*prompt, 21, 22, 23]  # another answer: the snapshot near the end of the prompt
        third = run.ask(other, MAX_TOKENS, share_prefix=True)
        assert third["cached_tokens"] == len(prompt) - 1  # the last snapshot is that before its last token
        assert third["token_ids"] == greedy(package, other)


@pytest.mark.parametrize(
    ("role", "name"),
    [
        *((role, "qwen3.5") for role in ("decode", "prefill", "coordinator")),
        *((role, "kimi linear groups") for role in ("decode", "loader")),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in (
                ("loader", "qwen3.5"),
                ("prefill", "kimi linear groups"),
                ("coordinator", "kimi linear groups"),
            )
        ),
    ],
)
def test_kills_change_no_token(role: str, name: str, shell: Shell, converted: Converted) -> None:
    package = converted(name, "f16")
    prompts = [tokens(RECIPES[name], length) for length in (40, 25, 33)]
    with shell.up(package.path, "--workers", "2", "--sequences", "3") as run:
        expected = [run.ask(one, 60)["token_ids"] for one in prompts]
        generator = random.Random(role)
        for _ in range(3):
            with ThreadPoolExecutor(len(prompts)) as threads:
                asked = [threads.submit(run.ask, one, 60, share_prefix=True) for one in prompts]
                time.sleep(generator.random() / 50)
                os.kill(run.pid(role), signal.SIGKILL)
                answers = [one.result() for one in asked]
            if role != "coordinator":  # a coordinator's end ends its requests
                assert [answer["token_ids"] for answer in answers] == expected
            again = [run.ask(one, 60, share_prefix=True)["token_ids"] for one in prompts]
            assert again == expected


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_token(kind: str, shell: Shell, converted: Converted) -> None:
    """Texts of two different tokens repeat themselves, and change: then drafted tokens are refused, and the text goes
    on from the state after those that are accepted."""
    package, prompt = converted(kind, "f16"), tokens(RECIPES[kind], 20)
    few = tuple(Bias(token=token, bias=80.0) for token in (5, 6))
    options = {"logit_bias": few, "temperature": 2.0, "seed": 3, "frequency_penalty": 0.5}

    def kill_in_the_middle(token: Token) -> None:
        if token.index == 45:
            os.kill(run.pid("decode"), signal.SIGKILL)

    with shell.up(package.path, "--workers", "2") as run:
        single = run.ask(prompt, 90, draft=False, **options)
        drafted = run.ask(prompt, 90, seen=kill_in_the_middle, **options)
        assert drafted["token_ids"] == single["token_ids"]
        assert 0 < drafted["accepted_tokens"] < drafted["drafted_tokens"]
        turn = [*prompt, *drafted["token_ids"], 11, 12]
        again = run.ask(turn, MAX_TOKENS, share_prefix=True)
        assert again["token_ids"] == run.ask(turn, MAX_TOKENS, share_prefix=False)["token_ids"]


def test_its_checkpoint_is_converted_and_run_by_two_commands(shell: Shell, tmp_path: Path) -> None:
    source, package = write_checkpoint(tmp_path / "model", RECIPES["granite hybrid"]), tmp_path / "package"
    done = shell.call("convert", source, "-o", package, "--quantization", "q8")
    assert done.code == 0, done.errors
    prompt = "the words of a prompt"
    first, second = (
        shell.json("run", package, "-p", prompt, "-n", "6", "--temperature", "0", *options)
        for options in (("--workers", "1"), ("--workers", "2", "--ffn-resident", "30%"))
    )
    assert first["token_ids"] == second["token_ids"]


def test_accelerators_refuse_it_in_one_line(shell: Shell, converted: Converted) -> None:
    package = converted("lfm2", "q8", "relu")
    for backend in ("accelerator=opencl", "prefill=onnx:cpu"):
        assert "recurrent" in shell.refused("up", package.path, "--backend", backend)
