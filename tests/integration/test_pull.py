"""From a name to a conversation: pulled, run by name, interrupted, gone on with, removed; from the hub on loopback."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.checkpoints import RECIPES, write_checkpoint
from tests.hub_mirror import Mirror, hub_mirror
from tests.pipeline import PATIENCE_S, Shell

NAME = "bamboo-tiny"
ASK = ("-p", "the", "--max-tokens", "4", "--temperature", "0")


@pytest.fixture
def mirror(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    """A hub that has a small checkpoint in two shards, and a data folder of its own."""
    with hub_mirror() as mirror:
        mirror.add("org/Bamboo-Tiny", write_checkpoint(tmp_path / "source", RECIPES["bamboo"]))
        monkeypatch.setenv("HF_ENDPOINT", mirror.address)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
        monkeypatch.delenv("NEURONPIPE_DATA", raising=False)
        yield mirror


def test_from_a_name_to_a_conversation(shell: Shell, mirror: Mirror, tmp_path: Path) -> None:
    pulled = shell.json("pull", "org/Bamboo-Tiny")
    assert Path(pulled["package"]) == tmp_path / "data" / "neuronpipe" / "packages" / "Bamboo-Tiny"
    by_name, by_path = (shell.json("run", package, *ASK) for package in (NAME, pulled["package"]))
    assert by_name["text"] == by_path["text"]
    with shell.up(Path(NAME)) as run:
        assert f"Bamboo-Tiny: the run at {run.path} uses it" in shell.refused("rm", "Bamboo-Tiny", beside=True)
    assert shell.json("rm", "Bamboo-Tiny")["removed"] == ["Bamboo-Tiny"]
    assert "no package has that name" in shell.refused("run", NAME, *ASK)


@pytest.mark.parametrize(
    "number",
    [*(pytest.param(one, marks=pytest.mark.nightly) for one in (signal.SIGINT, signal.SIGTERM)), signal.SIGKILL],
)
def test_a_pull_that_is_ended_goes_on(number: signal.Signals, shell: Shell, mirror: Mirror) -> None:
    second = "model-00002-of-00002.safetensors"
    mirror.hold[second] = 10_000
    process = shell.start("pull", "org/Bamboo-Tiny")
    assert mirror.held.wait(PATIENCE_S)
    assert "is being made by another command" in shell.refused("pull", "org/Bamboo-Tiny", beside=True)
    assert "is being made by another command" in shell.refused("rm", "Bamboo-Tiny", beside=True)
    (unfinished,) = shell.json("list")["unfinished"]
    assert unfinished["under_way"]
    began = time.monotonic()
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert time.monotonic() - began < PATIENCE_S / 4, "it waited for the network"
    if number != signal.SIGKILL:
        assert "the download is kept: the same command continues it" in errors
    assert shell.json("list")["packages"] == []
    mirror.hold.clear()
    mirror.let_go.set()
    first_bytes = mirror.sent_bytes("model-00001-of-00002.safetensors")
    shell.json("pull", "org/Bamboo-Tiny")
    assert mirror.sent_bytes("model-00001-of-00002.safetensors") == first_bytes
    assert shell.json("inspect", NAME)["name"] == "Bamboo-Tiny"
