"""`convert --measure TEXT`: how much worse than in f16 a new package predicts a text."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from neuronpipe.launch.perplexity import TextLoss

from tests.conformance.checkpoints import TINY, write_checkpoint
from tests.pipeline import Shell

TEXT = "A package is measured with a run of it, and so is its source in f16. " * 4


@pytest.mark.nightly
def test_a_new_package_is_compared_with_its_source_in_f16(shell: Shell, tmp_path: Path) -> None:
    source, text = write_checkpoint(tmp_path / "source", TINY), tmp_path / "text.txt"
    text.write_text(TEXT)
    package, folder = tmp_path / "packages/new", tmp_path / "packages"
    measured = shell.json("convert", source, "-o", package, "--quantization", "q4", "--measure", text)["measured"]
    assert [path.name for path in folder.iterdir()] == ["new"]  # the package in f16 is gone
    assert shell.json("perplexity", package, "--text", text)["perplexity"] == pytest.approx(measured["perplexity"])
    shell.json("convert", source, "-o", tmp_path / "f16", "--bits", "16")
    in_f16 = shell.json("perplexity", tmp_path / "f16", "--text", text)
    assert in_f16["perplexity"] == pytest.approx(measured["perplexity_f16"])
    assert in_f16["tokens"] == measured["tokens"]
    assert measured["perplexity"] != pytest.approx(measured["perplexity_f16"])


def test_a_package_is_calibrated_by_a_text_and_by_an_imatrix_file(shell: Shell, tmp_path: Path) -> None:
    source, text = write_checkpoint(tmp_path / "source", TINY), tmp_path / "text.txt"
    text.write_text(TEXT)
    (imatrix := tmp_path / "imatrix.dat").write_bytes(older_imatrix(TINY.width))
    made = {
        name: shell.json("convert", source, "-o", tmp_path / name, *options)
        for name, options in (("plain", ()), ("text", ("--calibrate", text)), ("file", ("--imatrix", imatrix)))
    }
    assert [answer["importance"] for answer in made.values()] == [None, "text.txt", "imatrix.dat"]
    errors = [answer["quantization_error"]["attention"] for answer in made.values()]
    assert len(set(errors)) == len(errors), errors
    assert shell.json("inspect", tmp_path / "text")["source"]["importance"] == "text.txt"
    assert shell.json("run", tmp_path / "text", "-p", "a b", "--max-tokens", "4")["token_ids"]
    answer = shell.refused("convert", source, "-o", tmp_path / "no", "--imatrix", text)
    assert f"{text}: " in answer
    assert not (tmp_path / "no").exists()


def older_imatrix(width: int) -> bytes:
    """An imatrix file in which every other column of one matrix counts ten times as much."""
    name, values = b"blk.0.attn_q.weight", [1.0, 10.0] * (width // 2)
    return struct.pack(f"<ii{len(name)}sii{width}f", 1, len(name), name, 1, width, *values)


def test_a_text_that_cannot_be_read_is_refused_before_anything_is_converted(shell: Shell, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", TINY)
    answer = shell.refused("convert", source, "-o", tmp_path / "package", "--measure", tmp_path / "no.txt")
    assert "no.txt" in answer
    assert not (tmp_path / "package").exists()


def test_an_increase_is_a_share_of_the_perplexity_in_f16() -> None:
    assert TextLoss(11.0, 10.0, 5).increase == pytest.approx(0.1)
