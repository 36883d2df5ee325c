"""Prompts that survive: what one run has computed another one reads, and generates the same tokens."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.launch.planning import DEMO

from tests.conformance.checkpoints import RECIPES, write_checkpoint
from tests.http_client import served
from tests.pipeline import PATIENCE_S, Run, Shell, eventually

CHUNK = 64
MOST = 24
DRAW = random.Random(11)
PROMPT = [DRAW.randrange(5, 1000) for _ in range(300)]
OTHER = [*PROMPT[:70], *(DRAW.randrange(5, 1000) for _ in range(230))]


def own_caches(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Give commands a cache of their own, with the figures of this device; returns the folder of prompts in it."""
    cache = Path(shutil.copytree(os.environ["XDG_CACHE_HOME"], folder / "cache", ignore=lambda *_: ["prompts"]))
    patch.setenv("XDG_CACHE_HOME", str(cache))
    return cache / "neuronpipe" / "prompts"


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return own_caches(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def expected(long_shell: Shell) -> dict[str, list[int]]:
    """What is generated after the prompts if everything is computed."""
    with long_shell.up(DEMO, "--prompt-cache", "0") as run:
        return {name: run.ask(prompt, MOST)["token_ids"] for name, prompt in (("one", PROMPT), ("other", OTHER))}


def ask(run: Run, prompt: list[int] = PROMPT, **options: Any) -> dict[str, Any]:
    return run.ask(prompt, MOST, share_prefix=True, **options)


def files(caches: Path) -> list[Path]:
    return sorted(caches.glob("*.prefix"))


def stored_bytes(caches: Path) -> int:
    """The sizes of all files but those that are evicted meanwhile."""
    sizes = 0
    for file in files(caches):
        with contextlib.suppress(FileNotFoundError):
            sizes += file.stat().st_size
    return sizes


def saved(caches: Path, chunks: int) -> bool:
    return eventually(lambda: len(files(caches)) >= chunks)


@pytest.fixture(scope="module")
def saved_prompts(long_shell: Shell, expected: dict[str, list[int]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run leaves that has saved PROMPT and its completion."""
    with pytest.MonkeyPatch.context() as patch:
        kept = own_caches(tmp_path_factory.mktemp("saved"), patch)
        with long_shell.up(DEMO) as run:
            first = ask(run)
            assert (first["token_ids"], first["cached_tokens"]) == (expected["one"], 0)
            assert saved(kept, (len(PROMPT) + MOST - 1) // CHUNK)
    return kept


@pytest.fixture
def filled(saved_prompts: Path, caches: Path) -> Path:
    """The folder of prompts with PROMPT and its completion."""
    return Path(shutil.copytree(saved_prompts, caches))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param((), marks=pytest.mark.nightly),
        pytest.param(("--workers", "2"), marks=pytest.mark.nightly),  # which the next turn has too
        pytest.param(("--sequences", "3", "--context", "400"), marks=pytest.mark.nightly),
        ("--ffn-resident", "20%", "--workers", "1"),
        ("--without", "pipeline,bundle"),
    ],
    ids=" ".join,
)
def test_after_a_restart_a_prompt_is_read_and_goes_on_with_the_same_tokens(
    shell: Shell, filled: Path, expected: dict[str, list[int]], options: tuple[str, ...]
) -> None:
    with shell.up(DEMO, *options) as run:
        again = ask(run)
        assert again["cached_tokens"] == len(PROMPT) // CHUNK * CHUNK
        assert again["token_ids"] == expected["one"]
        other = ask(run, OTHER)
        assert other["cached_tokens"] >= CHUNK
        assert other["token_ids"] == expected["other"]


def test_a_next_turn_reads_the_completion_too(shell: Shell, filled: Path, expected: dict[str, list[int]]) -> None:
    turn = [*PROMPT, *expected["one"][:20], *PROMPT[:50]]
    with shell.up(DEMO, "--workers", "2") as run:
        again = ask(run, turn)
        assert again["cached_tokens"] == 5 * CHUNK > len(PROMPT)
        assert again["token_ids"] == run.ask(turn, MOST)["token_ids"]


def test_a_slot_that_another_request_needs_is_saved_and_not_lost(
    shell: Shell, caches: Path, expected: dict[str, list[int]]
) -> None:
    with shell.up(DEMO, "--sequences", "1") as run:
        for _ in range(3):
            for prompt, name in ((PROMPT, "one"), (OTHER, "other")):
                answer = ask(run, prompt)
                assert answer["token_ids"] == expected[name]
        assert answer["cached_tokens"] >= 4 * CHUNK


def test_nothing_is_written_without_a_prompt_cache_or_if_a_request_does_not_share(shell: Shell, caches: Path) -> None:
    with shell.up(DEMO, "--prompt-cache", "0") as run:
        ask(run)
    with shell.up(DEMO) as run:
        run.ask(PROMPT, MOST)
    assert not files(caches)


def test_a_context_without_a_whole_chunk_has_no_prompt_cache(shell: Shell, caches: Path) -> None:
    with shell.up(DEMO, "--context", "63") as run:
        assert ask(run, PROMPT[:30])["tokens"] == MOST
    assert not caches.exists()


@pytest.mark.nightly
def test_the_budget_is_kept_and_the_plan_states_it(shell: Shell, caches: Path, expected: dict[str, list[int]]) -> None:
    options = ("--prompt-cache", "1MiB")
    assert "prompt cache on disk: 1.0 MiB" in shell.call("plan", DEMO, *options).out
    with shell.up(DEMO, *options, "--sequences", "1") as run:
        for number in range(4):
            prompt = [number + 5, *PROMPT]
            ask(run, prompt)
            assert stored_bytes(caches) <= 1 << 20
        assert ask(run)["token_ids"] == expected["one"]
    assert files(caches)


def test_damaged_files_cost_a_line_each_and_are_computed_again(
    shell: Shell, filled: Path, expected: dict[str, list[int]]
) -> None:
    for number, file in enumerate(files(filled)):
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2] if number % 2 else content[:-1] + b"x")
    with shell.up(DEMO) as run:
        again = ask(run)
        assert (again["cached_tokens"], again["token_ids"]) == (0, expected["one"])
        log = (run.path / "loader.0.log").read_text()
        assert log.count("is ignored and removed") == 1
        assert saved(filled, 5)
    with shell.up(DEMO) as run:
        # The first chunk was removed and written again; the others are found out one by one.
        assert ask(run)["token_ids"] == expected["one"]


@pytest.mark.parametrize("kills", [2, pytest.param(8, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("role", ["loader", pytest.param("coordinator", marks=pytest.mark.nightly)])
def test_kills_while_prompts_are_saved_and_restored_leave_nothing_wrong(
    shell: Shell, caches: Path, expected: dict[str, list[int]], role: str, kills: int
) -> None:
    draw = random.Random(role)
    with shell.up(DEMO, "--sequences", "1", "--ffn-resident", "30%") as run:
        answers: list[tuple[str, list[int]]] = []

        def ask_often() -> None:
            for number in range(3 * kills):
                name, prompt = (("one", PROMPT), ("other", OTHER))[number % 2]
                answers.append((name, ask(run, prompt)["token_ids"]))

        asking = threading.Thread(target=ask_often)
        asking.start()
        for _ in range(kills):
            time.sleep(draw.uniform(0.05, 0.5))
            if asking.is_alive() and eventually(lambda: run.status().ready):
                answered = len(answers)
                os.kill(run.pid(role), signal.SIGKILL)
                # A request that has seen two kills is refused.
                eventually(lambda answered=answered: len(answers) > answered or not asking.is_alive(), PATIENCE_S)
        asking.join(PATIENCE_S)
        assert not asking.is_alive()
        assert answers == [(name, expected[name]) for name in ("one", "other") * (3 * kills // 2)]
    with shell.up(DEMO) as run:
        assert ask(run)["token_ids"] == expected["one"]
        assert ask(run, OTHER)["token_ids"] == expected["other"]
        assert not list(caches.glob("*.part")), "what was written when the loader was killed"


def test_a_recurrent_model_goes_on_from_the_last_state_that_was_saved(
    shell: Shell, caches: Path, tmp_path: Path
) -> None:
    recipe = dataclasses.replace(RECIPES["qwen3.5"], context_tokens=2048)
    source, package = write_checkpoint(tmp_path / "model", recipe), tmp_path / "package"
    assert shell.call("convert", source, "-o", package, "--quantization", "f16").code == 0
    prompt = [DRAW.randrange(5, 500) for _ in range(1300)]
    with shell.up(package, "--prompt-cache", "0") as run:
        whole = ask(run, prompt)["token_ids"]
    with shell.up(package) as run:
        assert ask(run, prompt)["token_ids"] == whole
        chunks = len(prompt) // CHUNK
        assert saved(caches, chunks + 1), "the chunks, and a state"
    with shell.up(package, "--workers", "1", "--sequences", "3", "--ffn-resident", "30%") as run:
        again = ask(run, prompt)
        assert again["token_ids"] == whole
        # The second to last step of the prompt ended with the state that was saved.
        assert len(prompt) - 512 - CHUNK < again["cached_tokens"] < len(prompt)
        assert again["cached_tokens"] % CHUNK == 0
    states = [file for file in files(caches) if b'"tokens": []' in file.read_bytes()[:4096]]
    assert states
    for file in states:
        file.write_bytes(file.read_bytes()[:-1])
    with shell.up(package) as run:
        again = ask(run, prompt)
        assert (again["cached_tokens"], again["token_ids"]) == (0, whole)


def test_a_swap_of_the_loader_and_of_a_worker_keeps_the_prompts(
    shell: Shell, filled: Path, expected: dict[str, list[int]]
) -> None:
    with shell.up(DEMO, "--sequences", "1") as run:
        shell.json("swap", "loader", "--run", run.path)
        assert ask(run)["cached_tokens"] == 4 * CHUNK
        ask(run, OTHER)
        shell.json("swap", "prefill", "--run", run.path)
        again = ask(run)
        assert (again["cached_tokens"], again["token_ids"]) == (5 * CHUNK - CHUNK, expected["one"])


def test_usage_counts_restored_tokens_unless_the_request_says_no(shell: Shell, filled: Path) -> None:
    with served(shell, DEMO) as server:
        fields = {"prompt": PROMPT, "max_tokens": 4, "temperature": 0.0}
        fresh = server.post("/v1/completions", **fields, cache_prompt=False).json()
        assert fresh["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    with served(shell, DEMO) as server:
        again = server.post("/v1/completions", **fields).json()
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 4 * CHUNK
        assert again["choices"][0]["text"] == fresh["choices"][0]["text"]
