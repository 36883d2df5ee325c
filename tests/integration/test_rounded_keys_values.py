"""Runs with a KV cache of q8: the same tokens under any limit, worker, batch and crash, and prompts of their own on
disk."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from neuronpipe.launch.planning import DEMO

from tests.faults.kills import kill_in_a_step
from tests.integration.test_prompts_on_disk import CHUNK, MOST, OTHER, PROMPT, ask, own_caches, saved
from tests.pipeline import Shell

Q8 = ("--kv-type", "q8")


@pytest.fixture(scope="module")
def expected(long_shell: Shell) -> dict[str, list[int]]:
    """What is generated after the prompts by one worker with everything resident."""
    with long_shell.up(DEMO, *Q8, "--workers", "1", "--prompt-cache", "0") as run:
        return {name: run.ask(prompt, MOST)["token_ids"] for name, prompt in (("one", PROMPT), ("other", OTHER))}


def test_memory_workers_batch_and_crash_change_no_token(shell: Shell, expected: dict[str, list[int]]) -> None:
    options = ("--workers", "2", "--ffn-resident", "30%", "--sequences", "2", "--prompt-cache", "0")
    with shell.up(DEMO, *Q8, *options) as run:
        answers: dict[str, list[int]] = {}
        prompts = {"one": PROMPT, "other": OTHER}

        def ask_for(name: str) -> None:
            answers[name] = run.ask(prompts[name], MOST)["token_ids"]

        asking = [threading.Thread(target=ask_for, args=(name,)) for name in prompts]
        for one in asking:
            one.start()
        kill_in_a_step(run, "decode")
        for one in asking:
            one.join()
        assert answers == expected
        # The beginning of a prompt is copied from another sequence.
        again = [run.ask(prompt, MOST, share_prefix=True)["token_ids"] for prompt in prompts.values()]
        assert again == list(expected.values())


def test_a_prompt_is_read_by_runs_of_the_same_type_only(
    shell: Shell, expected: dict[str, list[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = own_caches(tmp_path, monkeypatch)
    with shell.up(DEMO, *Q8) as run:
        assert ask(run)["token_ids"] == expected["one"]
        assert saved(caches, (len(PROMPT) + MOST - 1) // CHUNK)
    with shell.up(DEMO, *Q8, "--workers", "2") as run:
        again = ask(run)
        assert (again["token_ids"], again["cached_tokens"]) == (expected["one"], len(PROMPT) // CHUNK * CHUNK)
    with shell.up(DEMO) as run:
        assert ask(run)["cached_tokens"] == 0


def test_what_cannot_be_rounded_is_refused(shell: Shell) -> None:
    said = shell.refused("plan", DEMO, *Q8, "--quality", "exact")
    assert "--kv-type q8 and --quality exact" in said
    plan = shell.folder / "plan.json"
    assert shell.call("plan", DEMO, "-o", plan).code == 0
    content = json.loads(plan.read_text())
    assert content["compute"]["kv_type"] == "f16"
    plan.write_text(json.dumps(content | {"compute": content["compute"] | {"kv_type": "q4"}}))
    assert "kv_type" in shell.refused("up", DEMO, "--plan", plan)
