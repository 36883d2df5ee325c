"""What a person or a disk gets wrong: one line that names file and field, exit code 2, nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from neuronpipe.launch.cli import main
from neuronpipe.plans.package.manifest import identity
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError

from tests.conformance.checkpoints import RECIPES, TINY, config, write_checkpoint
from tests.conformance.gguf_files import write_gguf
from tests.pipeline import COMMAND, PATIENCE_S, Shell, beside_progress

Converted = Callable[..., Package]
ASK = ("-p", "the rain", "-n", "4")


@pytest.fixture
def package(converted: Converted, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return Path(shutil.copytree(converted("qwen2", "q8").path, tmp_path / "package"))


def flip(file: Path, at: int) -> None:
    """Change one bit."""
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


@pytest.mark.parametrize("name", ["fixed.safetensors", "tokenizer.json", "checksums.bin", "bundles.bin"])
def test_a_truncated_file_is_named(shell: Shell, package: Path, name: str) -> None:
    file = package / name
    os.truncate(file, file.stat().st_size - 1)
    said = shell.refused("run", package, *ASK)
    assert f"{file}: " in said
    assert "truncated" in said


@pytest.mark.parametrize(
    "name",
    [
        "fixed.safetensors",
        *(pytest.param(one, marks=pytest.mark.nightly) for one in ("tokenizer.json", "checksums.bin")),
    ],
)
def test_a_changed_bit_is_found_at_the_start(shell: Shell, package: Path, name: str) -> None:
    file = package / name
    flip(file, file.stat().st_size // 2)
    for verb in (("run", package, *ASK), ("up", package)):
        said = shell.refused(*verb)
        assert f"{file}: " in said
        assert "sha256" in said


@pytest.mark.parametrize("name", ["fixed.safetensors", "manifest.json", "bundles.bin"])
def test_a_missing_file_is_named(shell: Shell, package: Path, name: str) -> None:
    (package / name).unlink()
    assert str(package / name) in shell.refused("run", package, *ASK)


def test_a_damaged_neuron_fails_the_texts_that_need_it(shell: Shell, package: Path) -> None:
    """It is found when it is read, and named; a run that stays does not end of it."""
    layout = Package.open(package).manifest.layout
    last_layer = 2 * layout.clusters * layout.cluster_stride_bytes
    flip(package / "bundles.bin", last_layer + 5)
    for options in ((), ("--ffn-resident", "30%")):
        said = shell.refused("run", package, *ASK, *options)
        assert "bundles.bin" in said
        assert "layer 2, neurons 0 to" in said
    with shell.up(package, "--ffn-resident", "30%") as run:
        for _ in range(2):
            with pytest.raises(UserError, match=r"bundles\.bin: layer 2"):
                run.ask("the rain", 4)
        assert run.status().ready
        assert all(process.restarts == 0 for process in run.status().processes)
    flip(package / "bundles.bin", last_layer + 5)
    assert shell.json("run", package, *ASK)["tokens"] == 4


def test_an_unknown_activation_is_refused(shell: Shell, package: Path) -> None:
    path = package / "manifest.json"
    manifest = json.loads(path.read_text())
    manifest["model"]["activation"] = "gelu"
    path.write_text(json.dumps(manifest))
    said = shell.refused("run", package, *ASK)
    assert str(path) in said
    assert "activation" in said
    manifest["model"]["activation"] = "relu"  # known, but not what was converted
    path.write_text(json.dumps(manifest))
    assert "id: the content was changed" in shell.refused("run", package, *ASK)
    manifest["id"] = identity({name: value for name, value in manifest.items() if name != "id"})
    path.write_text(json.dumps(manifest))
    assert shell.call("run", package, *ASK).code == 0


def test_there_is_no_package(shell: Shell, tmp_path: Path) -> None:
    assert "no such package directory" in shell.refused("run", tmp_path / "nothing", *ASK)
    assert "manifest.json: missing" in shell.refused("run", tmp_path, *ASK)


def test_too_little_memory_says_how_much_is_needed(shell: Shell, package: Path) -> None:
    for typed in ("20MiB", "20MB", "0.02GiB", "0.02gb", "20000000"):
        said = shell.refused("run", package, *ASK, "--memory", typed)
        least = said.split(f"--memory {typed}: the least for this package is ")[1].split(": ")[0]
        assert least.lower().endswith(typed.lstrip("0123456789.").lower() or "bytes")
    assert shell.call("run", package, *ASK, "--memory", least.removesuffix(" bytes")).code == 0
    assert "--ffn-resident" in shell.refused("run", package, *ASK, "--ffn-resident", "0%")


def test_a_prompt_longer_than_the_context(shell: Shell, package: Path) -> None:
    said = shell.refused("run", package, "-p", "the rain " * 200)
    assert "maximum context length is 128 tokens" in said
    with shell.up(package) as run:
        assert "length is 128" in shell.refused("ask", "--run", run.path, "-p", "the rain " * 200, beside=True)
        assert "the prompt is empty" in shell.refused("ask", "--run", run.path, "-p", "", beside=True)
        assert run.ask("the rain", 4)["tokens"] == 4


def test_places_that_cannot_serve(shell: Shell, package: Path, tmp_path: Path) -> None:
    long = tmp_path / ("long" * 40)
    assert "too long for a socket" in shell.refused("up", package, "--run", long)
    assert "cannot make the run directory" in shell.refused("run", package, *ASK, "--run", "/proc/nowhere")
    assert "cannot be" in shell.refused("plan", package, "-o", "/proc/plan.json")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter").write_text("dear")
    assert "not empty" in shell.refused("up", package, "--run", tmp_path / "full")
    assert (tmp_path / "full" / "letter").read_text() == "dear"
    source = write_checkpoint(tmp_path / "source", TINY)
    assert "/proc: cannot make a directory there" in shell.refused("convert", source, "-o", "/proc/package")
    assert "exists already" in shell.refused("convert", source, "-o", tmp_path / "full")
    assert (tmp_path / "full" / "letter").read_text() == "dear"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("run", "--nonsense"), "--nonsense"),
        (("run", "--memory", "lots"), "'lots' is not a size"),
        (("run", "--ffn-resident", "150%"), "'150%' is not a share"),
        (("run", "--temperature", "-1", "-p", "x"), "--temperature"),
        (("run", "-n", "0", "-p", "x"), "--max-tokens"),
        (("run", "-p", "x", "--workers", "0"), "--workers"),
        (("run", "-p", "x", "--context", "0"), "--context"),
        (("up", "--sequences", "0"), "--sequences"),
        (("ask", "--run"), "--run"),
        (("walk",), "walk"),
        (("stauts",), "did you mean `status`?"),
        (("run", "-p", ""), "give -p TEXT"),
        (("convert", "SparseLLM/ReluLLaMA-7B"), "`neuronpipe pull SparseLLM/ReluLLaMA-7B`"),
        (("perplexity", "--text", "/nowhere"), "/nowhere"),
        (("convert", "/nowhere"), "/nowhere"),
    ],
)
def test_words_that_mean_nothing(
    package: Path, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], named: str
) -> None:
    place = [str(package)] if words[:1] in {("run",), ("up",), ("perplexity",)} else []
    assert main([*words[:1], *place, *words[1:]]) == 2
    (line,) = beside_progress(capsys.readouterr().err).splitlines()
    assert line.startswith("neuronpipe: ")
    assert named in line


@pytest.mark.nightly
def test_a_prompt_may_be_a_word_and_one_without_a_blank_is_told_where_it_belongs(shell: Shell, package: Path) -> None:
    said = shell.json("run", package, "Once upon a time", "-n", "4")
    assert said["text"] == shell.json("run", package, "-p", "Once upon a time", "-n", "4")["text"]
    assert (
        shell.json("run", "def add(a, b):", "-n", "4")["text"]
        == shell.json("run", "-p", "def add(a, b):", "-n", "4")["text"]
    )
    assert "a prompt of one word is given with -p" in shell.refused("run", "Once")
    assert "`neuronpipe run -p TEXT`" in shell.refused("run", "x" * 300)
    assert "no such package directory; make one" in shell.refused("run", "Once upon a time", "-p", "x")


@pytest.mark.nightly
def test_a_model_file_is_run_by_the_package_that_is_made_of_it(
    shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEURONPIPE_DATA", str(tmp_path / "data"))
    source = write_gguf(tmp_path / "model.gguf", TINY)
    first, again, named = (shell.call("run", model, *ASK, "--json") for model in (source, source, "model"))
    assert f"{source}: converting it, once" in first.errors
    assert "converting" not in again.errors
    texts = {json.loads(done.out)["text"] for done in (first, again, named)}
    assert len(texts) == 1


@pytest.mark.nightly
def test_a_silu_model_that_does_not_fit_is_told_once_that_every_neuron_fires(
    shell: Shell, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told after every run, also where nothing was streamed."""
    cache = Path(os.environ["XDG_CACHE_HOME"])
    monkeypatch.setenv("XDG_CACHE_HOME", str(shutil.copytree(cache, tmp_path / "cache", ignore=lambda *_: ["notices"])))
    whole, first, again = (shell.call("run", package, *ASK, *words) for words in ((), *[("--ffn-resident", "50%")] * 2))
    assert [done.code for done in (whole, first, again)] == [0, 0, 0]
    assert ["every neuron fires" in done.errors for done in (whole, first, again)] == [False, True, False]
    (line,) = [line for line in first.errors.splitlines() if "every neuron fires" in line]
    assert len(line.split()) < 32
    assert "silu: every neuron fires" in shell.call("inspect", package).out
    assert "silu: every neuron fires" in shell.json("inspect", package)["warnings"][0]


def test_a_model_that_needs_a_choice_says_which_and_how(shell: Shell, tmp_path: Path) -> None:
    """Its activation, before it is converted; its chat template; a predictor for predicted mode."""
    sparseqwen = write_checkpoint(tmp_path / "qwen", replace(TINY, architecture="Qwen2ForCausalLM", bias=True))
    assert "convert" in shell.refused("run", sparseqwen, *ASK)
    assert "say which it is with --activation" in shell.refused("convert", sparseqwen, "-o", tmp_path / "p")
    shell.json("convert", sparseqwen, "-o", tmp_path / "p", "--activation", "drelu")
    assert "no template" in shell.call("inspect", tmp_path / "p").out
    assert "make one with" in shell.refused("run", tmp_path / "p", *ASK, "--mode", "predicted")
    assert "without a chat template" in shell.refused("run", tmp_path / "p", *ASK, "--system", "Be brief.")
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    words = ("--activation", "drelu", "--chat-template", tmp_path / "mine.jinja", "--overwrite")
    shell.json("convert", sparseqwen, "-o", tmp_path / "p", *words)
    assert shell.call("run", tmp_path / "p", *ASK, "--system", "Be brief.").code == 0
    assert "chat    by its own template" in shell.call("inspect", tmp_path / "p").out


def test_no_words_at_all_are_answered_with_help(shell: Shell) -> None:
    said = shell.call()
    assert said.code == 2
    assert "usage: neuronpipe" in said.errors
    assert "serve" in said.errors


def test_lines_to_paste_begin_with_the_command_as_it_was_typed_and_quote_paths(shell: Shell, package: Path) -> None:
    run = shell.folder / "a run"
    done = shell.call("up", package, "--run", run, environment={"NEURONPIPE_COMMAND": "./a place/neuronpipe"})
    try:
        assert f"'./a place/neuronpipe' down --run '{run}'\n" in done.out
    finally:
        assert shell.call("down", "--run", run).code == 0


@pytest.mark.alone  # `ask` finds the only live run of this user, wherever it lies: another test's, too
def test_an_error_tells_what_to_do_with_the_command_as_it_was_typed(shell: Shell, package: Path) -> None:
    typed = {"NEURONPIPE_COMMAND": "./launch/neuronpipe"}
    for words, advice in (
        (("ask", "-p", "x", "--run", shell.folder / "none"), "start one with `./launch/neuronpipe up`"),
        (("run", package, *ASK, "--mode", "predicted"), "`./launch/neuronpipe profile PACKAGE`"),
        (("wlak",), "See `./launch/neuronpipe --help`"),
    ):
        assert advice in shell.call(*words, environment=typed).errors


def test_a_prompt_that_is_refused_is_not_repeated(shell: Shell, package: Path) -> None:
    for words in (("-p", "the rain " * 200), (*ASK, "--use", "decode=no.such.module:Class")):
        said = shell.call("run", package, *words)
        assert said.code == 2
        assert said.out == ""


def test_bytes_that_are_no_text_are_refused_in_one_line(shell: Shell, package: Path) -> None:
    latin1 = "\u00e9t\u00e9".encode("latin1")
    # Python 3.11 finds an editable installation below a path with umlauts only where the locale can spell it.
    for locale in ("C", "C.UTF-8") if sys.prefix.isascii() else ("C.UTF-8",):
        piped = shell.start("run", package, stdin=subprocess.PIPE, environment={"LC_ALL": locale})
        assert piped.stdin is not None
        piped.stdin.buffer.write(latin1)
        _, errors = piped.communicate(timeout=PATIENCE_S)
        assert piped.returncode == 2
        (line,) = beside_progress(errors).splitlines()
        assert "standard input: not UTF-8" in line
    assert "argument -p/--prompt: not UTF-8" in shell.refused("run", package, "-p", os.fsdecode(latin1))


def test_a_closed_standard_output_is_one_line(shell: Shell, package: Path) -> None:
    closed = ("sh", "-c", '"$@" >&-', "sh", *COMMAND)
    said = shell.call("run", package, *ASK, program=closed)
    assert said.code == 2
    assert said.errors == "neuronpipe: standard output is closed: let it go to a file, or to /dev/null\n"


def test_closed_standard_input_and_error_change_nothing(shell: Shell, package: Path) -> None:
    closed = ("sh", "-c", '"$@" <&- 2>&-', "sh", *COMMAND)
    said = shell.call("run", package, *ASK, "--temperature", "0", program=closed)
    assert (said.code, said.errors) == (0, "")
    assert said.out == shell.call("run", package, *ASK, "--temperature", "0").out


def test_a_plan_for_another_package_is_refused(shell: Shell, package: Path, converted: Converted) -> None:
    plan = shell.folder / "plan.json"
    assert shell.call("plan", converted("qwen2", "q4").path, "-o", plan).code == 0
    said = shell.refused("run", package, *ASK, "--plan", plan)
    assert str(plan) in said
    assert "neuronpipe plan" in said
    plan.write_text(plan.read_text()[:200])
    assert str(plan) in shell.refused("run", package, *ASK, "--plan", plan)


@pytest.mark.nightly
def test_sources_that_would_be_computed_wrongly(shell: Shell, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", TINY)
    file = source / "config.json"
    for change, named in (({"hidden_act": "gelu"}, "gelu"), ({"architectures": ["GPT2LMHeadModel"]}, "GPT2")):
        file.write_text(json.dumps({**config(TINY), **change}))
        said = shell.refused("convert", source, "-o", tmp_path / "target")
        assert str(file) in said
        assert named in said
    file.write_text(json.dumps(config(TINY)))
    os.truncate(source / "model.safetensors", 1000)
    assert str(source / "model.safetensors") in shell.refused("convert", source, "-o", tmp_path / "target")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["source"]


def test_a_gguf_that_readers_take_for_silu_needs_a_word(shell: Shell, tmp_path: Path) -> None:
    """Architecture llama cannot say ReLU; a name that says it means weights that stock readers compute wrongly."""
    source = write_gguf(tmp_path / "model-relu.gguf", replace(RECIPES["llama3"], activation="silu"))
    said = shell.refused("convert", source, "-o", tmp_path / "package", "--quantization", "q8")
    assert str(source) in said
    assert "--activation" in said
    made = shell.json("convert", source, "-o", tmp_path / "package", "--quantization", "q8", "--activation", "relu")
    assert made["activation"] == "relu"
    os.truncate(source, source.stat().st_size // 2)
    assert str(source) in shell.refused("convert", source, "-o", tmp_path / "other", "--activation", "relu")


@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk_while_converting_leaves_nothing(shell: Shell, tmp_path: Path) -> None:
    source, disk = write_checkpoint(tmp_path / "source", RECIPES["qwen2"]), tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "none", disk], check=False).returncode != 0:
        pytest.skip("mounting is not allowed here")
    try:
        said = shell.refused("convert", source, "-o", disk / "package")
        assert str(disk / "package") in said
        assert "free" in said
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)
