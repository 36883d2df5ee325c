"""A path that people mean to convert or run and cannot as it is: the error says what it is and the next command."""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from neuronpipe.plans.convert import convert
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError

from tests.conformance.checkpoints import TINY, write_checkpoint
from tests.conformance.gguf_files import write_gguf

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:{}\nsize 4000000000\n".format("0" * 64)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint in a folder whose name a shell would take apart."""
    return write_checkpoint(tmp_path / "my model", replace(TINY, layers=1))


def refusal(path: Path) -> str:
    """What conversion says, in one line."""
    with pytest.raises(UserError) as caught:
        convert(path, path.parent / "package", quantization="q4")
    assert not (path.parent / "package").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "typed", ["SparseLLM/ReluLLaMA-7B", "https://huggingface.co/SparseLLM/ReluLLaMA-7B", "SparseLLM/ReluLLaMA-7B/"]
)
def test_a_repository_is_pulled(typed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        convert(Path(typed), tmp_path / "package", quantization="q4")
    assert "`neuronpipe pull SparseLLM/ReluLLaMA-7B`" in str(caught.value)


def test_a_path_that_is_no_repository_is_only_missing(tmp_path: Path) -> None:
    assert "No such file" in refusal(tmp_path / ("x" * 300))
    assert refusal(tmp_path / "nothing" / "here").endswith("cannot be read: No such file or directory")


def test_a_word_that_is_no_path_is_told_what_a_source_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UserError, match="expected a Hugging Face model's folder or a GGUF file, and `neuronpipe pull ORG"
    ):
        convert(Path("llama3"), tmp_path / "package", quantization="q4")


def test_one_file_of_a_checkpoint_stands_for_its_directory(source: Path) -> None:
    assert f"`neuronpipe convert '{source}'`" in refusal(source / "model.safetensors")


def test_a_folder_without_a_configuration_is_told_what_was_expected_and_what_is_there(source: Path) -> None:
    (source / "config.json").unlink()
    said = refusal(source)
    expected = "no package, which has manifest.json, and no Hugging Face model, which has config.json"
    assert said.startswith(f"{source}: {expected}: it holds model.safetensors")
    assert said.endswith("; name the folder of one of these, or a GGUF file")
    empty = source.parent / "empty"
    empty.mkdir()
    assert refusal(empty).startswith(f"{empty}: {expected}: it is empty; ")


def test_a_folder_around_a_model_names_the_model(source: Path) -> None:
    around = source.parent / "around"
    around.mkdir()
    for number in range(12):
        (around / f"{number:02}.txt").touch()
    inner = source.rename(around / "model")
    said = refusal(around)
    assert "it holds 00.txt, 01.txt, " in said
    assert said.endswith(f" and 5 more; did you mean {inner}?")


def test_pickled_weights_are_not_read(source: Path) -> None:
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    said = refusal(source)
    assert "pickled weights and no safetensors" in said
    code = shlex.split(said.partition("`")[2].partition("`")[0])
    assert code[:2] == ["python", "-c"]
    compile(code[2], "advice", "exec")
    assert json.dumps(str(source)) in code[2]


def test_a_slow_tokenizer_is_saved_as_a_fast_one(source: Path) -> None:
    (source / "tokenizer.json").rename(source / "vocab.json")
    said = refusal(source)
    assert "tokenizer.json: missing, there is vocab.json only" in said
    assert "AutoTokenizer" in said
    assert "--tokenizer FILE" in said


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_git_lfs_pointer_is_named(name: str, source: Path) -> None:
    (source / name).write_text(POINTER)
    said = refusal(source)
    assert f"{source / name}: a Git-LFS pointer, not the file itself" in said
    assert f"`git -C '{source}' lfs pull`" in said


def test_a_gguf_that_is_a_git_lfs_pointer_is_named(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_text(POINTER)
    assert f"{tmp_path / 'm.gguf'}: a Git-LFS pointer" in refusal(tmp_path / "m.gguf")


def test_a_pipe_in_place_of_a_file_is_not_waited_for(source: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        kept = (source / name).rename(source / "kept")
        os.mkfifo(source / name)
        assert f"{source / name}: cannot be read: not a regular file" in refusal(source)
        (source / name).unlink()
        kept.rename(source / name)


def test_a_directory_of_gguf_files_names_one(tmp_path: Path) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    write_gguf(folder / "m.gguf", TINY)
    assert f"`neuronpipe convert {folder / 'm.gguf'}`" in refusal(folder)


def test_a_package_is_not_converted_again(source: Path, tmp_path: Path) -> None:
    made = convert(source, tmp_path / "made", quantization="q4").path
    assert f"a package already; run it with `neuronpipe run {made} -p TEXT`" in refusal(made)


def test_a_model_file_that_is_run_is_converted_first(source: Path, tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "m.gguf", TINY)
    for path, kind in ((gguf, "a GGUF file"), (source, "a Hugging Face checkpoint")):
        with pytest.raises(UserError) as caught:
            Package.open(path)
        assert kind in str(caught.value)
        assert f"`neuronpipe convert {shlex.quote(str(path))}`" in str(caught.value)
    with pytest.raises(UserError) as caught:
        Package.open(source / "model.safetensors")
    assert f"`neuronpipe convert {shlex.quote(str(source))}`" in str(caught.value)
