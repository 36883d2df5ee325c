"""`neuronpipe models` on a described device, whose figures are the same on every machine; `pull` of a short name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.launch.catalog.estimates import MAX_USABLE_FIRST_TOKEN_S, MIN_USABLE_TOKENS_PER_S
from neuronpipe.plans.lab.devices.device_file import FOLDER
from neuronpipe.plans.pull.catalog import catalog

from tests.conformance.checkpoints import RECIPES
from tests.conformance.gguf_files import write_gguf
from tests.hub_mirror import hub_mirror
from tests.pipeline import Shell


@pytest.fixture
def small_device(tmp_path: Path) -> Path:
    """A description of a device of 8 GB with slow flash."""
    description = json.loads((FOLDER / "oneplus-12.json").read_text(encoding="utf-8"))
    description["name"] = "a small device"
    description["memory_usable_gb"] = {"value": 6, "source": "assumed"}
    for block in description["flash_random"]["points"]:
        block["gb_per_s"] /= 4
    file = tmp_path / "small.json"
    file.write_text(json.dumps(description), encoding="utf-8")
    return file


def by_name(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {model["name"]: model for model in answer["models"]}


def test_the_models_of_a_device_in_their_order(shell: Shell, small_device: Path) -> None:
    answer = shell.json("models", "--device", small_device)
    assert answer == shell.json("models", "--device", small_device), "nothing of this machine is in it"
    assert (answer["device"], answer["memory_bytes"]) == ("a small device", 6_000_000_000)
    models = answer["models"]
    assert {model["name"] for model in models} == set(catalog())
    assert [model["runs"] for model in models] == sorted((model["runs"] for model in models), reverse=True)
    usable = [model["name"] for model in models if model["usable"]]
    assert usable == [name for name in catalog() if name in usable], "the most capable first"
    assert answer["best"] == usable[0] == models[0]["name"]
    for model in models:
        if model["runs"]:
            assert model["min_memory_bytes"] <= 6e9
        if model["usable"]:
            assert model["tokens_per_s"] >= MIN_USABLE_TOKENS_PER_S
            assert model["first_token_s"] <= MAX_USABLE_FIRST_TOKEN_S
    slow = [model["tokens_per_s"] for model in models if model["runs"] and not model["usable"]]
    assert slow == sorted(slow, reverse=True)


@pytest.mark.nightly
def test_what_does_not_fit_is_shown_only_with_the_reason(shell: Shell, small_device: Path) -> None:
    words = ("models", "--device", small_device, "--memory", "700MiB")
    models = by_name(shell.json(*words))
    refused = {name for name, model in models.items() if not model["runs"]}
    assert "qwen3.6-35b-a3b" in refused
    assert models["smollm2-135m"]["runs"]
    page, whole = (shell.call(*words, *more) for more in ((), ("--all",)))
    assert max(map(len, [*page.out.splitlines(), *whole.out.splitlines()])) <= 80
    for name, model in models.items():
        assert (re.search(rf"^{re.escape(name)} ", page.out, re.MULTILINE) is None) == (name in refused)
        line = next(line for line in whole.out.splitlines() if line.startswith(f"{name} "))
        assert (model["problem"] in line) if name in refused else ("GiB" in line or "MiB" in line)
    assert f"{len(refused)} of {len(models)} models do not run like this; --all shows why" in page.out


def test_a_mode_is_planned_only_for_models_that_have_it(shell: Shell, small_device: Path) -> None:
    models = by_name(shell.json("models", "--device", small_device, "--mode", "predicted"))
    assert {name for name, model in models.items() if model["runs"]} == {"turbosparse-7b", "turbosparse-47b"}
    assert models["qwen3-8b"]["problem"] == "has no predictor, as mode predicted needs"


@pytest.mark.nightly
def test_a_longer_context_takes_more_memory(shell: Shell, small_device: Path) -> None:
    short, long = (
        by_name(shell.json("models", "--device", small_device, "--context", tokens))["qwen3-8b"]
        for tokens in ("1024", "8192")
    )
    assert short["min_memory_bytes"] < long["min_memory_bytes"]


@pytest.mark.parametrize("tokens", ["0", "-5", "512"])
def test_a_context_without_room_for_a_prompt_and_an_answer_is_refused(shell: Shell, tokens: str) -> None:
    assert f"--context {tokens}: expected more than" in shell.refused("models", "--context", tokens)


def test_a_short_name_pulls_its_file_of_the_hub(shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = catalog()["qwen3-0.6b"]
    assert first.file is not None
    folder = tmp_path / "repository"
    folder.mkdir()
    write_gguf(folder / first.file, RECIPES["smollm3"])
    with hub_mirror() as mirror:
        mirror.add(first.repository, folder)
        monkeypatch.setenv("HF_ENDPOINT", mirror.address)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("NEURONPIPE_DATA", str(tmp_path / "data"))
        pulled = shell.json("pull", "Qwen3-0.6B", "--context", "64")
    assert (pulled["name"], pulled["repository"]) == ("qwen3-0.6b", first.repository)
    assert (tmp_path / "data" / "packages" / "qwen3-0.6b" / "manifest.json").is_file()
    assert "did you mean qwen3-0.6b" in shell.refused("pull", "qwen3-0.6")
