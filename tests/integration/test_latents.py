"""A model with latents through the whole pipeline: small memory, prefix reuse, several sequences, and refusals."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.reference.engine import ReferenceEngine
from neuronpipe.protocol.run_directory import RunDirectory

from tests.conformance.checkpoints import RECIPES, tokens, write_checkpoint
from tests.pipeline import Shell

Converted = Callable[..., Package]
MAX_TOKENS = 10


def greedy(package: Package, prompt: list[int]) -> list[int]:
    """The reference engine's most likely tokens."""
    text, engine = list(prompt), ReferenceEngine(package)
    for _ in range(MAX_TOKENS):
        text.append(int(engine.run(text).logits[-1].argmax()))
    return text[len(prompt) :]


def test_several_sequences_share_prefixes_in_small_memory(shell: Shell, converted: Converted) -> None:
    package, prompt = converted("deepseek v3", "f16"), tokens(RECIPES["deepseek v3"], 40)
    prompts = [prompt, [*prompt[:30], 7], [*prompt[:20], 8, 9], prompt[:12]]
    expected = [greedy(package, one) for one in prompts]
    with shell.up(package.path, "--ffn-resident", "40%", "--workers", "2", "--sequences", "4") as run:
        with ThreadPoolExecutor(len(prompts)) as threads:
            at_once = list(threads.map(lambda one: run.ask(one, MAX_TOKENS), prompts))
        assert [answer["token_ids"] for answer in at_once] == expected
        assert sum(answer["flash"]["reads"] for answer in at_once) > 0
        shared = [run.ask(one, MAX_TOKENS, share_prefix=True) for one in prompts]
        assert [answer["token_ids"] for answer in shared] == expected
        assert min(answer["cached_tokens"] for answer in shared) >= 11
        model, memory = package.manifest.model, RunDirectory(run.path).read()
        with memory.open_segment("kv") as segment:
            values = model.layers * 4 * model.context_tokens * (model.latent_width + model.rotary_width)
            assert segment.layout["kv"].total_bytes == 2 * values


def test_its_checkpoint_is_converted_and_run_by_two_commands(shell: Shell, tmp_path: Path) -> None:
    source, package = write_checkpoint(tmp_path / "model", RECIPES["deepseek v2"]), tmp_path / "package"
    done = shell.call("convert", source, "-o", package, "--quantization", "f16")
    assert done.code == 0, done.errors
    prompt = "the words of a prompt"
    first, second = (
        shell.json("run", package, "-p", prompt, "-n", "6", "--temperature", "0", *options)
        for options in (("--workers", "1"), ("--workers", "2", "--ffn-resident", "30%"))
    )
    assert first["token_ids"] == second["token_ids"]


def test_accelerators_refuse_it_in_one_line(shell: Shell, converted: Converted) -> None:
    package = converted("deepseek v2", "q8", "relu")
    for backend in ("accelerator=opencl", "prefill=onnx:cpu"):
        assert "latents" in shell.refused("up", package.path, "--backend", backend)
