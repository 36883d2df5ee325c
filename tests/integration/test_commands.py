"""The verbs, as a script uses them: their JSON, their exit codes, and that `down` leaves nothing."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import string
from collections.abc import Callable
from pathlib import Path

import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package.reader import Package

from tests.http_client import served
from tests.pipeline import Shell

Converted = Callable[..., Package]
PROMPT = "the rain in there"


def test_run_json_has_every_field_and_is_greedy(shell: Shell, converted: Converted) -> None:
    package = converted("awkward", "q8").path
    said = shell.json("run", package, "-p", PROMPT, "-n", "8")
    assert set(said) >= {
        "text", "tokens", "prompt_tokens", "ttft_ms", "tokens_per_s", "tbt_ms", "memory", "flash", "plan", "mode",
    }  # fmt: skip
    assert said["tokens"] == len(said["token_ids"]) == 8
    assert said["prompt_tokens"] > 1
    assert said["ttft_ms"] > 0
    assert said["tokens_per_s"] > 0
    assert 0 < said["tbt_ms"]["p50"] <= said["tbt_ms"]["p90"] <= said["tbt_ms"]["p99"]
    assert 0 < said["memory"]["peak_bytes"] < said["memory"]["limit_bytes"]
    assert said["flash"]["bytes"] >= 0  # everything fits: what was read, was read before the request or for it
    assert said["flash"]["reads"] >= 0
    assert 0 <= said["flash"]["miss_rate"] <= 1
    assert len(said["plan"]) == 16
    assert said["mode"] == "exact"
    greedy = shell.json("run", package, "-p", PROMPT, "-n", "8", "--temperature", "0", "--seed", "7")
    assert (greedy["text"], greedy["token_ids"]) == (said["text"], said["token_ids"])


def test_run_streams_the_prompt_and_the_text_to_a_person(shell: Shell, converted: Converted) -> None:
    package = converted("qwen2", "q8").path
    done = shell.call("run", package, "-p", PROMPT, "-n", "6", "--temperature", "0")
    assert done.code == 0
    assert done.out == PROMPT + shell.json("run", package, "-p", PROMPT, "-n", "6")["text"] + "\n"
    assert "[6 tokens, " in done.errors


def test_a_prompt_comes_from_standard_input_too(shell: Shell, converted: Converted) -> None:
    package = converted("qwen2", "q8").path
    piped = shell.start("run", package, "-n", "4", "--json", stdin=-1)
    out, _ = piped.communicate(PROMPT)
    assert json.loads(out)["text"] == shell.json("run", package, "-p", PROMPT, "-n", "4")["text"]


def test_a_run_that_stays_answers_like_run_and_goes_without_a_trace(shell: Shell, converted: Converted) -> None:
    package, place = converted("qwen2", "q8").path, shell.folder / "r"
    assert shell.call("ask", "--run", place, "-p", PROMPT).code == 3
    assert shell.call("status", "--run", place).code == 3
    assert shell.call("down", "--run", place).code == 3
    said = shell.json("up", package, "--run", place, "--workers", "2")
    assert said["run"] == str(place)

    first = shell.json("run", package, "-p", PROMPT, "-n", "8")
    asked = shell.json("ask", "--run", place, "-p", PROMPT, "-n", "8")
    assert set(asked) == set(first)
    assert (asked["text"], asked["token_ids"]) == (first["text"], first["token_ids"])

    status = shell.json("status", "--run", place)
    processes = {(process["role"], process["index"]) for process in status["processes"]}
    roles = ("coordinator", "loader", "cache", "prefill")
    assert processes == {*((role, 0) for role in roles), ("decode", 0), ("decode", 1)}
    live = set(shell.processes())
    for process in status["processes"]:
        assert process["state"] == "ready"
        assert process["pid"] in live
        assert process["core"] is None or process["core"] in os.sched_getaffinity(0)
    assert live == {said["supervisor_pid"], *(process["pid"] for process in status["processes"])}

    segments = _segments_of(live)
    assert len(segments) >= 6  # or the search for what is left of them shows nothing
    assert shell.json("down", "--run", place) == {"run": str(place), "stopped": True}
    assert shell.processes() == []
    assert not place.exists()
    assert not _segments_of(int(p.name) for p in Path("/proc").glob("[0-9]*")) & segments
    assert shell.call("down", "--run", place).code == 3


def _segments_of(pids: object) -> set[int]:
    """Inode numbers of the memory files these processes hold open."""
    found = set()
    for pid in pids:  # type: ignore[attr-defined]
        try:
            descriptors = list(Path(f"/proc/{pid}/fd").iterdir())
        except OSError:
            continue
        for descriptor in descriptors:
            try:
                if os.readlink(descriptor).startswith("/memfd:"):
                    found.add(descriptor.stat().st_ino)
            except OSError:
                continue
    return found


def test_a_run_has_the_same_names_whoever_tells_of_it(shell: Shell, converted: Converted) -> None:
    package = converted("qwen2", "q8")
    up = shell.json("up", package.path)
    status, watched = shell.json("status"), shell.json("watch", "--once")
    assert set(up) == {"run", "id", "model", "package", "plan", "supervisor_pid"}
    assert {name: status[name] for name in up} == up
    assert (up["model"], up["package"]) == (package.manifest.name, str(package.path))
    assert {name: watched[name] for name in ("id", "model", "plan")} == {n: up[n] for n in ("id", "model", "plan")}
    said = shell.call("status").out
    assert all(str(up[name]) in said for name in ("run", "model", "package", "plan"))
    assert shell.json("stop") == {"run": up["run"], "stopped": True}


def test_a_run_is_found_wherever_its_directory_is(shell: Shell, converted: Converted) -> None:
    """Below the folder for run directories, and started with another such folder."""
    package, folder = converted("qwen2", "q8").path, shell.folder / "deeper"
    folder.mkdir()
    for words, elsewhere in ((("--run", folder / "r"), {}), ((), {"XDG_RUNTIME_DIR": str(folder)})):
        place = shell.json("up", package, *words, environment=elsewhere)["run"]
        assert Path(place).parent == folder
        assert shell.json("status")["run"] == place
        assert shell.json("watch", "--once")["source"] == place
        assert shell.json("down") == {"run": place, "stopped": True}


def test_the_only_run_need_not_be_named(shell: Shell, converted: Converted) -> None:
    with shell.up(converted("qwen2", "q8").path) as run:
        assert shell.json("status")["run"]
        with shell.up(converted("qwen2", "q8").path) as other:
            said = shell.refused("status", beside=True)
            assert str(run.path) in said
            assert str(other.path) in said


def test_a_plan_that_was_written_is_obeyed(shell: Shell, converted: Converted) -> None:
    package, plan = converted("qwen2", "q8").path, shell.folder / "plan.json"
    assert shell.call("plan", package, "--workers", "1", "--context", "50", "-o", plan).code == 0
    said = shell.json("run", package, "-p", PROMPT, "-n", "4", "--plan", plan)
    assert said["plan"] == json.loads(plan.read_text())["id"]


def test_status_for_a_person_is_a_table(shell: Shell, converted: Converted) -> None:
    with shell.up(converted("qwen2", "q8").path) as run:
        done = shell.call("status", "--run", run.path)
        assert done.code == 0
        assert all(role in done.out for role in ("coordinator.0", "loader.0", "cache.0", "prefill.0", "decode.0"))


def test_plan_gateway_shows_what_serve_obeys(shell: Shell, converted: Converted) -> None:
    """It showed a plan for one text, where serve had room for four."""
    options = (converted("awkward", "q8").path, "--memory", "256MiB", "--workers", "1")
    shown = shell.json("plan", "--gateway", *options)
    assert shown.pop("search")["candidates"]
    assert shown.pop("earlier_runs") == []
    with served(shell, *options) as server:
        assert json.loads((server.run.path / "plan.json").read_text()) == shown
    assert shown["compute"]["sequences"] > 1
    assert shell.json("plan", "--gateway", "--sequences", "3", *options)["compute"]["sequences"] == 3


@pytest.mark.nightly
def test_up_and_serve_have_room_for_texts_that_cost_one_text_hardly_anything(shell: Shell) -> None:
    """Both had as many KV caches as the limit holds with the fewest neurons; then one, since a second took as much from
    neurons, whether or not it ever came. Slots have its memory until it does."""
    for gateway in ((), ("--gateway",)):
        limit = shell.json("plan", "--sequences", "2", *gateway)["memory"]["least_bytes"] + (8 << 20)
        one, two = (
            shell.json("plan", "--sequences", count, "--memory", str(limit), *gateway)["expected"]["tokens_per_s"]
            for count in ("1", "2")
        )
        assert two >= 0.9 * one
        with contextlib.ExitStack() as stack:
            if gateway:
                run = stack.enter_context(served(shell, "--memory", str(limit))).run
            else:
                run = stack.enter_context(shell.up(DEMO, "--memory", str(limit)))
            assert run.status().max_sequences >= 2


@pytest.mark.nightly
def test_every_verb_that_runs_a_silu_model_can_leave_silent_neurons_out(
    shell: Shell, converted: Converted, tmp_path: Path
) -> None:
    """And `run` says what that costs, as it was measured."""
    package = shutil.copytree(converted("qwen2", "f16").path, tmp_path / "package")
    (tmp_path / "text").write_text(string.ascii_letters * 20)
    assert "set them with `" in shell.refused("run", package, "-p", "ab", "--mode", "thresholded")
    silent = shell.json("profile", package, "--silent", "50%", "--text", tmp_path / "text")["silent"]
    words = ("run", package, "-p", "ab", "-n", "4")
    said = shell.json(*words, "--mode", "thresholded", "--ffn-resident", "40%")
    assert said["mode"] == "thresholded"
    assert said["silent"]["thresholded_perplexity"] == silent["thresholded_perplexity"]
    assert "silent" not in shell.json(*words)
    told = shell.call(*words, "--mode", "thresholded")
    assert told.code == 0
    assert f"neuronpipe: mode thresholded: {silent['loss']}" in told.errors
    assert "silu: every neuron fires" not in told.errors
    held = ("perplexity", package, "--text", tmp_path / "text", "--mode")
    exact, thresholded = (shell.json(*held, mode)["perplexity"] for mode in ("exact", "thresholded"))
    assert exact != thresholded
    with shell.up(package, "--mode", "thresholded") as run:
        assert run.status().mode == "thresholded"
        assert run.ask("ab", 4)["token_ids"] == said["token_ids"]
