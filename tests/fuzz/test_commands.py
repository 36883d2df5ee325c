"""Damaged checkpoints, GGUF files, packages and plans through the command itself; `commands.py` says what must hold."""

from __future__ import annotations

import random

import pytest

from tests.fuzz.commands import Fuzzed, damaged

NAMES = (
    "convert config.json",
    "convert frequencies",
    "convert generation_config.json",
    "convert gguf",
    "convert model-00001-of-00002.safetensors",
    "convert model.safetensors.index.json",
    "convert relu",
    "convert tokenizer.json",
    "convert tokenizer_config.json",
    "inspect",
    "plan",
)
INPUTS = 12  # of each; tests/nightly/fuzz.py tries as many as its time allows


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Fuzzed:
    """Files that are right until one is damaged, and right again afterwards."""
    return Fuzzed(tmp_path_factory.mktemp("fuzzed"))


@pytest.mark.parametrize("name", NAMES)
def test_damaged_files_are_obeyed_or_refused_in_one_line(name: str, fuzzed: Fuzzed) -> None:
    target, contents = fuzzed.targets()[name]
    for content in contents:
        target(content)
    for seed in range(INPUTS):
        draw = random.Random(seed)
        target(damaged(draw, draw.choice(contents)))


def test_every_kind_of_file_is_tried(fuzzed: Fuzzed) -> None:
    assert sorted(fuzzed.targets()) == sorted(NAMES)
