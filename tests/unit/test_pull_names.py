"""Names of packages and of repositories, what a repository must hold, and how much disk shards need."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
from neuronpipe.launch.arguments.settings import settings_file
from neuronpipe.launch.cli import main
from neuronpipe.plans.convert.checkpoint_pieces import Piece
from neuronpipe.plans.convert.source_file import SourceFile
from neuronpipe.plans.pull.package_library import checked_name, data_folder, package_path
from neuronpipe.plans.pull.pull import peak_bytes
from neuronpipe.plans.pull.repository import Reference, RemoteFile, Snapshot
from neuronpipe.protocol.errors import UserError


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data folder of nobody else, and an empty folder to be in."""
    monkeypatch.setenv("NEURONPIPE_DATA", str(tmp_path / "data"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "data"


def add_package(data: Path, name: str) -> Path:
    """As much of a package as names need."""
    package = data / "packages" / name
    package.mkdir(parents=True)
    (package / "manifest.json").write_text("{}")
    return package


@pytest.mark.parametrize(
    ("text", "expected", "name"),
    [
        ("org/model", Reference("org/model"), "model"),
        ("org/model@v1.0", Reference("org/model", None, "v1.0"), "model"),
        ("org/model@refs/pr/7", Reference("org/model", None, "refs/pr/7"), "model"),
        ("org/m-GGUF:m.Q4_0.gguf", Reference("org/m-GGUF", "m.Q4_0.gguf"), "m.Q4_0"),
        ("org/m:sub/m q4.gguf@abc", Reference("org/m", "sub/m q4.gguf", "abc"), "m-q4"),
        ("https://huggingface.co/org/model", Reference("org/model"), "model"),
    ],
)
def test_a_repository_its_file_and_its_revision(text: str, expected: Reference, name: str) -> None:
    assert Reference.parse(text) == expected
    assert expected.name == name


@pytest.mark.parametrize(
    "text",
    ["model", "org/", "a/b/c", "org/model:config.json", "org/model:../x.gguf", "org/model@", "", "../etc/passwd"],
)
def test_what_names_no_repository_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"names no repository|only a \.gguf file"):
        Reference.parse(text)


def test_a_quantization_in_place_of_a_file_is_told_how_to_find_the_file() -> None:
    with pytest.raises(UserError, match=r"'Q4_K_M'.* in full; `neuronpipe pull org/m-GGUF` says which there are"):
        Reference.parse("org/m-GGUF:Q4_K_M")


@pytest.mark.parametrize("text", ["./model.gguf", "model.gguf", "/models/a b.gguf"])
def test_a_file_on_this_disk_needs_no_pull(text: str) -> None:
    with pytest.raises(UserError, match=r"needs no pull: `neuronpipe chat FILE\.gguf`, and one at a hub is ORG/NAME:"):
        Reference.parse(text)


@pytest.mark.parametrize("text", ["", ".hidden", "a/b", "..", "-x", "a b", "x" * 97, "é"])
def test_a_name_is_a_file_name_that_looks_the_same_everywhere(text: str) -> None:
    with pytest.raises(UserError, match="is no name for a package"):
        checked_name(text)


def test_where_packages_lie(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for variable in ("NEURONPIPE_DATA", "XDG_DATA_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_folder() == tmp_path / ".local" / "share" / "neuronpipe"
    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert data_folder() == tmp_path / ".local" / "share" / "neuronpipe"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "xdg"))
    assert data_folder() == tmp_path / "xdg" / "neuronpipe"
    monkeypatch.setenv("NEURONPIPE_DATA", str(tmp_path / "mine"))
    assert data_folder() == tmp_path / "mine"


def test_who_has_no_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("NEURONPIPE_DATA", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "NEURONPIPE_CONFIG"):
        monkeypatch.delenv(variable, raising=False)

    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nowhere)
    with pytest.raises(UserError, match="set NEURONPIPE_DATA to a folder"):
        data_folder()
    assert settings_file() is None


def test_a_path_wins_over_a_name_and_case_does_not_matter(data: Path) -> None:
    package = add_package(data, "TinyLlama")
    assert package_path("TinyLlama") == package_path("tinyllama") == package
    other = add_package(data, "tinyllama")
    assert package_path("TinyLlama") == package
    assert package_path("tinyllama") == other
    assert package_path("TINYLLAMA") == Path("TINYLLAMA")  # which of the two?
    Path("tinyllama").mkdir()
    assert package_path("tinyllama") == Path("tinyllama")
    assert package_path("./TinyLlama") == Path("./TinyLlama")


@pytest.mark.parametrize("verb", ["run", "serve", "up", "plan", "inspect", "bench", "profile", "doctor"])
def test_a_name_that_does_not_exist_is_told_what_there_is(
    verb: str, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(name: str) -> str:
        assert main([verb, name]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    assert "make one with `neuronpipe convert`, or get one with `neuronpipe pull ORG/NAME`" in said("tinylama")
    for name in ("TinyLlama", "bamboo-7b"):
        add_package(data, name)
    line = said("tinylama")
    assert "tinylama: no such package directory, and no package has that name; did you mean TinyLlama?" in line
    assert line.endswith("There are TinyLlama, bamboo-7b")
    assert "`neuronpipe pull org/model`" in said("org/model")


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (
            "llama3",
            "get one with `neuronpipe pull ORG/NAME`, e.g. `neuronpipe pull qwen3-0.6b`",
        ),
        ("llama3:8b", "llama3:8b: no such package directory, and no package has that name; make one with"),
        ("hf.co/Qwen/Qwen3-0.6B", "from a hub it comes with `neuronpipe pull Qwen/Qwen3-0.6B`"),
        ("https://huggingface.co/Qwen/Qwen3-0.6B", "from a hub it comes with `neuronpipe pull Qwen/Qwen3-0.6B`"),
        ("Qwen/Q-GGUF:q.gguf", "from a hub it comes with `neuronpipe pull Qwen/Q-GGUF:q.gguf`"),
        ("./nope.gguf", "nope.gguf: no such file"),
        ("org/nope.gguf", "org/nope.gguf: no such file"),
        ("/nowhere/nope", "/nowhere/nope: no such package directory; make one"),
    ],
)
def test_a_model_that_is_not_there_is_told_what_would_be(
    name: str,
    complaint: str,
    data: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A missing GGUF file was called a package of an unknown name; nothing showed what a hub's name looks like."""
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for verb in ("chat", "serve"):
        assert main([verb, name]) == 2
        assert complaint in capsys.readouterr().err
    if name == "llama3":
        add_package(data, "TinyLlama-1.1B")
        assert main(["chat", name]) == 2
        assert "; there is TinyLlama-1.1B; `neuronpipe pull ORG/NAME` gets another, e.g. `" in capsys.readouterr().err


def test_a_missing_file_is_told_its_neighbours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in ("a.gguf", "b.gguf", "c.txt"):
        (tmp_path / file).touch()
    monkeypatch.chdir(tmp_path)  # errors cut long paths
    assert main(["run", "./nope.gguf", "hi"]) == 2
    assert capsys.readouterr().err.endswith("nope.gguf: no such file; in that folder there are a.gguf, b.gguf\n")


def test_a_repository_is_told_what_a_name_looks_like() -> None:
    with pytest.raises(UserError, match=r"expected ORG/NAME.*, e\.g\. `neuronpipe pull HuggingFaceTB/"):
        Reference.parse("llama3")
    assert Reference.parse("hf.co/Qwen/Qwen3-0.6B") == Reference.parse("Qwen/Qwen3-0.6B")


def snapshot(*names: str, sizes: dict[str, int] | None = None) -> Snapshot:
    """A repository with these files."""
    files = {name: RemoteFile(name, (sizes or {}).get(name, 100), None, "0" * 40) for name in names}
    return Snapshot("org/model", "c" * 40, files)


def test_only_data_is_taken_of_a_repository() -> None:
    there = snapshot(
        "config.json", "tokenizer.json", "modeling_custom.py", "model.safetensors", "model.safetensors.index.json",
        "pytorch_model.bin", "README.md", "chat_template.jinja",
    )  # fmt: skip
    names = {file.name for file in there.small_files(tokenizer=True)}
    assert names == {"config.json", "tokenizer.json", "chat_template.jinja"}
    assert {file.name for file in there.small_files(tokenizer=False)} == names - {"tokenizer.json"}


def test_a_tokenizer_of_sentencepiece_comes_where_there_is_no_other() -> None:
    files = ("config.json", "model.safetensors", "tokenizer.model", "tokenizer_config.json", "added_tokens.json")
    assert {file.name for file in snapshot(*files).small_files(tokenizer=True)} == {*files} - {"model.safetensors"}
    both = {file.name for file in snapshot(*files, "tokenizer.json").small_files(tokenizer=True)}
    assert both == {"config.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("config.json", "a.Q4_0.gguf"), r"it has a.Q4_0.gguf; name it: `neuronpipe pull org/model:a.Q4_0.gguf`"),
        (("a.gguf", "b.gguf"), r"it has a.gguf, b.gguf; name one: `neuronpipe pull org/model:FILE.gguf`"),
        (("a b.gguf",), r"name it: `neuronpipe pull 'org/model:a b.gguf'`"),
        (
            ("m-00001-of-00002.gguf", "m-00002-of-00002.gguf"),
            r"it has m.gguf in 2 parts; name it: `neuronpipe pull org/model:m.gguf`",
        ),
        (("config.json", "pytorch_model-1-of-2.bin"), "pickles can run code and are not read"),
        (("config.json", "README.md"), "has neither model.safetensors nor"),
        (("model.safetensors", "tokenizer.json"), "config.json: the repository has no such file"),
        (("model.safetensors", "config.json"), "has no tokenizer.json and no tokenizer.model: pass --tokenizer FILE"),
    ],
)
def test_a_repository_without_what_is_needed_says_what_is_missing(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        snapshot(*names).small_files(tokenizer=True)


def test_a_configuration_of_gigabytes_is_not_downloaded() -> None:
    there = snapshot("model.safetensors", "config.json", "tokenizer.json", sizes={"config.json": 1 << 30})
    with pytest.raises(UserError, match=r"config.json: 1073741824 bytes are no such file"):
        there.small_files(tokenizer=True)


def test_a_gguf_is_named_among_those_there_are() -> None:
    there = snapshot("a.gguf", "m-00001-of-00002.gguf", "m-00002-of-00002.gguf")
    assert there.gguf("a.gguf").name == "a.gguf"
    with pytest.raises(UserError, match=r"b.gguf: the repository has no such file; it has a.gguf, m.gguf in 2 parts"):
        there.gguf("b.gguf")
    assert {there.gguf(name).name for name in ("m-00002-of-00002.gguf", "m-00001-of-00002.gguf", "m.gguf")} == {
        "m-00001-of-00002.gguf"
    }
    assert snapshot("m.gguf", "m-00001-of-00001.gguf").gguf("m.gguf").name == "m.gguf"


class Sized(SourceFile):
    """A file of so many bytes."""

    def __init__(self, name: str, size: int) -> None:
        super().__init__(Path(name))
        self.entry = RemoteFile(name, size, None, None)


def held(*needed: str, ahead: bool) -> int:
    """The most that is held while pieces need these files; "ab" are files a and b, of 1, 10, 100 and 1000 bytes."""
    files = {letter: Sized(letter, 10**n) for n, letter in enumerate("abcd")}
    pieces = [Piece((), (), tuple(files[letter] for letter in letters)) for letters in needed]
    return peak_bytes(cast(Any, pieces), ahead=ahead)


def test_what_is_held_of_shards_depends_on_who_shares_them() -> None:
    assert held("a", "b", "c", "d", ahead=False) == 1000
    assert held("a", "b", "c", "d", ahead=True) == 1100
    assert held("a", "a", "ab", "b", "bc", "c", "cd", ahead=False) == 1100
    assert held("d", "a", "b", "c", "d", ahead=False) == 1100  # an embedding that is wanted again at the end
    assert held("abcd", "abcd", ahead=True) == 1111
    assert held("b", ahead=True) == 10
    assert held(ahead=False) == 0
