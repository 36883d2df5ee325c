"""tokenizer.model files: the ids that the sentencepiece library itself gives, or a refusal."""

from __future__ import annotations

import io
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import assume, example, given
from hypothesis import strategies as st
from neuronpipe.plans.convert import convert
from neuronpipe.plans.convert.gguf.gguf_tokenizer import build_tokenizer
from neuronpipe.plans.convert.sentencepiece_model import build_from_sentencepiece
from neuronpipe.plans.strict_json import Record
from neuronpipe.protocol.errors import UserError
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import Tokenizer

from tests.conformance.checkpoints import TINY, write_checkpoint
from tests.conformance.gguf_files import write_gguf

CORPUS = [
    (Path(__file__).parents[2] / "LICENSE").read_text(),
    "naïve café, 猫が好きです。 привет мир " * 20,
]
GOLDEN = json.loads((Path(__file__).parents[1] / "conformance" / "golden" / "splits.json").read_text())
LLAMA = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
KINDS: dict[str, dict[str, Any]] = {
    "as Llama's": {**LLAMA, "split_digits": True},
    "without bytes": {**LLAMA, "byte_fallback": False},
    "normalizing": {**LLAMA, "normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
    "normalizing all but spaces": {**LLAMA, "normalization_rule_name": "nmt_nfkc"},
    "without a space before": {**LLAMA, "add_dummy_prefix": False},
    "with a piece of its own": {**LLAMA, "add_dummy_prefix": False, "user_defined_symbols": ["<|sep|>"]},
    "with a piece beside spaces": {**LLAMA, "user_defined_symbols": ["<|sep|>"]},
}


@cache
def trained(kind: str, model_type: str = "bpe", pieces: int = 700) -> bytes:
    """A small tokenizer.model, made by the library."""
    file = io.BytesIO()
    lines = iter([line for text in CORPUS for line in text.splitlines()])
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines,
        model_writer=file,
        vocab_size=pieces,
        model_type=model_type,
        minloglevel=2,
        num_threads=1,
        **KINDS[kind],
    )
    return file.getvalue()


def placed(directory: Path, kind: str = "as Llama's", *, config: dict[str, Any] | None = None, **model: Any) -> Path:
    """A tokenizer.model in a directory, with a tokenizer_config.json."""
    path = directory / "tokenizer.model"
    path.write_bytes(trained(kind, **model))
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def built(path: Path) -> Tokenizer:
    """The tokenizer made from a tokenizer.model."""
    return Tokenizer.from_str(build_from_sentencepiece(path).decode())


@cache
def both(kind: str, directory: Path) -> tuple[sentencepiece.SentencePieceProcessor, Tokenizer]:
    """The library's own reading of a model, and ours."""
    directory.mkdir()
    return sentencepiece.SentencePieceProcessor(model_proto=trained(kind)), built(placed(directory, kind))


SAME = [kind for kind in KINDS if kind != "with a piece beside spaces"]


@pytest.mark.parametrize("kind", SAME)
def test_awkward_texts_get_the_librarys_ids(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    library, ours = both(kind, tmp_path_factory.getbasetemp() / f"any {kind}")
    for text in [*GOLDEN["texts"], *CORPUS, "x<|sep|>y"]:
        assert ours.encode(text, add_special_tokens=False).ids == library.encode(text), text


@pytest.mark.parametrize("kind", SAME)
def test_any_text_gets_the_librarys_ids(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    library, ours = both(kind, tmp_path_factory.getbasetemp() / f"any {kind}")

    @given(
        st.text(st.characters(exclude_categories=["Cs"]))
        | st.text(" \n\taehinst.1é猫ﬁ")
        | st.text("ae \r\n\u00b8\uff21\uff76\u0300\u0301\u0323\uff9e")
    )
    @example("\u00b8\u0300")
    @example("\x1f")
    @example("\x1f\u0300a")
    def same(text: str) -> None:
        assume("<s>" not in text and "</s>" not in text)  # the library takes them for letters, chats need them whole
        assert ours.encode(text, add_special_tokens=False).ids == library.encode(text)

    same()


@pytest.mark.parametrize("kind", ["as Llama's", "without bytes", "without a space before"])
def test_a_gguf_of_the_model_gets_the_librarys_ids(kind: str, tmp_path: Path) -> None:
    library, _ = both(kind, tmp_path / kind)
    numbers = range(library.vocab_size())
    kinds = [
        2 if library.is_unknown(n) else 3 if library.is_control(n) else 6 if library.is_byte(n) else 1 for n in numbers
    ]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [library.id_to_piece(n) for n in numbers],
        "tokenizer.ggml.scores": [float(library.get_score(n)) for n in numbers],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_space_prefix": kind != "without a space before",
    }
    ours = Tokenizer.from_str(build_tokenizer(Record(metadata, "m.gguf")).decode())
    for text in [*GOLDEN["texts"], *CORPUS]:
        assert ours.encode(text, add_special_tokens=False).ids == library.encode(text), text


def test_a_gguf_takes_a_sentencepiece_model_that_is_named_or_beside_it(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    model = placed(elsewhere, "without bytes", pieces=TINY.vocabulary)
    source = write_gguf(tmp_path / "m.gguf", TINY, metadata={"llama.hidden_activation": "relu"})
    named = convert(source, tmp_path / "p", tokenizer=model)
    source.write_bytes(source.read_bytes().replace(b"gpt-2", b"gpt-9"))
    placed(tmp_path, "without bytes", pieces=TINY.vocabulary)
    beside = convert(source, tmp_path / "q")
    assert named.tokenizer_path.read_bytes() == beside.tokenizer_path.read_bytes() == build_from_sentencepiece(model)


def test_texts_begin_and_end_as_the_configuration_says(tmp_path: Path) -> None:
    path = placed(tmp_path)
    begin, end = 1, 2  # <s> and </s>
    plain = built(path).encode("a text", add_special_tokens=False).ids
    assert built(path).encode("a text").ids == [begin, *plain]
    placed(tmp_path, config={"add_bos_token": False, "add_eos_token": True, "eos_token": {"content": "</s>"}})
    assert built(path).encode("a text").ids == [*plain, end]
    assert built(path).decode(plain) == "a text"


def test_pieces_that_were_added_later_have_their_numbers(tmp_path: Path) -> None:
    added = {
        "1": {"content": "<s>", "special": True},
        "700": {"content": "<|im_start|>", "special": True},
        "701": {"content": "tool", "special": False},
    }
    ours = built(placed(tmp_path, config={"added_tokens_decoder": added}))
    text = "<|im_start|>user tool"
    ids = ours.encode(text, add_special_tokens=False).ids
    assert (ids[0], ids[-1]) == (700, 701)
    assert ours.decode(ids) == "user tool"
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_start|>": 700, "tool": 701}))
    assert built(tmp_path / "tokenizer.model").encode(text, add_special_tokens=False).ids == ids


def test_a_space_stands_behind_special_tokens_only_where_it_used_to(tmp_path: Path) -> None:
    old, new = (built(placed(tmp_path, config={"legacy": legacy})) for legacy in (True, False))
    assert old.encode("the").ids == new.encode("the").ids
    assert old.encode("<s>the").tokens[2].startswith("▁")
    assert not new.encode("<s>the").tokens[2].startswith("▁")


def test_a_checkpoint_needs_no_tokenizer_json(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", TINY)
    (source / "tokenizer.json").unlink()
    small = TINY.vocabulary
    path = placed(source, "without bytes", pieces=small)
    package = convert(source, tmp_path / "p")
    expected = sentencepiece.SentencePieceProcessor(model_proto=path.read_bytes()).encode("the text")
    assert Tokenizer.from_file(str(package.tokenizer_path)).encode("the text", add_special_tokens=False).ids == expected
    placed(source, "without bytes", pieces=small + 10)
    with pytest.raises(UserError, match=rf"token id {small + 9} has no embedding"):
        convert(source, tmp_path / "q")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"tokenizer_class": "T5Tokenizer"},
            r"tokenizer_config\.json: tokenizer_class: 'T5Tokenizer' is not supported",
        ),
        ({"bos_token": "<begin>"}, r"bos_token: '<begin>' is no token"),
        ({"added_tokens_decoder": {"900": {"content": "far"}}}, r"'far' is added as number 900, which contradicts"),
        ({"added_tokens_decoder": {"5": {"content": "other"}}}, r"'other' is added as number 5, which contradicts"),
        ({"added_tokens_decoder": {"x": {"content": "other"}}}, r"added_tokens_decoder\.x: is no number"),
        ({"added_tokens_decoder": {"700": {"content": "<s>"}}}, r"tokenizer\.model: a token appears twice"),
    ],
)
def test_a_configuration_that_contradicts_the_model_is_refused(
    config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        build_from_sentencepiece(placed(tmp_path, config=config))


def test_what_is_joined_by_another_rule_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"only models of type BPE are read; save the model's tokenizer\.json"):
        build_from_sentencepiece(placed(tmp_path, model_type="unigram"))
    with pytest.raises(UserError, match=r"'<\|sep\|>': a user-defined piece beside spaces; save the model's"):
        build_from_sentencepiece(placed(tmp_path, "with a piece beside spaces"))
    assert built(placed(tmp_path, "with a piece beside spaces", config={"legacy": False})).encode("a<|sep|>b").tokens


def test_a_character_map_that_no_tokenizer_json_can_follow_is_refused(tmp_path: Path) -> None:
    path = placed(tmp_path)
    model = ModelProto.FromString(path.read_bytes())
    model.normalizer_spec.precompiled_charsmap = b"\x04\0\0\0"
    path.write_bytes(model.SerializeToString())
    with pytest.raises(UserError, match=r"its character map is not supported: truncated; save the model's"):
        build_from_sentencepiece(path)


def test_damaged_models_are_refused(tmp_path: Path) -> None:
    path = placed(tmp_path)
    for data in (b"", path.read_bytes()[:-5], b"hello, world\xff" * 20):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"tokenizer\.model: not a sentencepiece model"):
            build_from_sentencepiece(path)


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = placed(tmp_path)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    monkeypatch.delitem(sys.modules, "sentencepiece.sentencepiece_model_pb2", raising=False)
    with pytest.raises(UserError, match=r"`pip install sentencepiece protobuf`"):
        build_from_sentencepiece(path)
