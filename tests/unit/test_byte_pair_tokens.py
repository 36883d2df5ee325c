"""A byte-pair encoding that is read into tables gives the ids of the `tokenizers` library."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package import byte_pair_tokens
from neuronpipe.plans.package.byte_pair_tokens import BytePairTokens, TextNotSplit, tokenizer_bytes
from neuronpipe.protocol.errors import UserError
from neuronpipe.services.coordinator.text.tokenizer import FileTokenizer, LibraryTokens
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors

from tests.fuzz.test_model_files import mutated_bytes, mutated_json
from tests.unit.test_forced_text import KINDS

DEMO_CONTENT = (Path(DEMO) / "tokenizer.json").read_bytes()
AWKWARD = [
    *("", "a", " ", " a", "Ada", "Adam  and Eve", "the answer is\n\n  yes", "</s>", "a</s> <s>b<s>", "\u2581a\u2581"),
    *("e\u0301té", "\x00\x7f\ufeff", "name" * 9, "  " * 9, "漢字かな", "🙂👩‍👩‍👧", "<0x41>", "<unk>", "<unused0>x"),
]
LONG = ("the answer is yes " * 40, " " * 700, "a" * 700, "\n" * 700, "é" * 700, "</s>" * 200, "12345678" * 90)
texts = st.text() | st.lists(st.sampled_from([*AWKWARD, "name", "Ġ", "\n", " "])).map("".join)


def framed() -> str:
    """A tokenizer that adds tokens around a text, and takes whole words without merging them, as Llama 3's."""
    whole = json.loads(KINDS["GPT-2"]())
    whole["model"]["ignore_merges"] = True
    whole["model"]["vocab"] |= {"wholly": len(whole["model"]["vocab"])}
    library = Tokenizer.from_str(json.dumps(whole))
    library.add_special_tokens([AddedToken("<|begin|>"), AddedToken("<|end|>", rstrip=True)])
    special = [(name, library.token_to_id(name)) for name in ("<|begin|>", "<|end|>")]
    library.post_processor = processors.TemplateProcessing("<|begin|> $A <|end|>", special_tokens=special)
    return str(library.to_str())


CONTENTS = {name: kind().encode() for name, kind in ({**KINDS, "framed": framed}).items()} | {"demo": DEMO_CONTENT}


@pytest.fixture(scope="module", params=CONTENTS)
def both(request: pytest.FixtureRequest) -> tuple[BytePairTokens, LibraryTokens]:
    tokens = BytePairTokens.open(CONTENTS[request.param])
    assert tokens is not None
    return tokens, LibraryTokens(CONTENTS[request.param])


def require_equal(both: tuple[BytePairTokens, LibraryTokens], text: str) -> None:
    tokens, library = both
    for frame in (True, False):
        ids = library.encode(text, frame=frame)
        assert tokens.encode(text, frame=frame) == ids
    for special in (True, False):
        assert tokens.decode(ids, special=special) == library.decode(ids, special=special)


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_texts_have_the_librarys_ids(both: tuple[BytePairTokens, LibraryTokens], text: str) -> None:
    require_equal(both, text)


@given(text=texts)
def test_any_text_has_the_librarys_ids(both: tuple[BytePairTokens, LibraryTokens], text: str) -> None:
    require_equal(both, text)


def test_ids_have_the_librarys_names(both: tuple[BytePairTokens, LibraryTokens]) -> None:
    tokens, library = both
    assert (tokens.ids, tokens.longest_name_bytes) == (library.ids, library.longest_name_bytes)
    assert [tokens.name(token) for token in range(tokens.ids + 2)] == [
        library.name(token) for token in range(tokens.ids + 2)
    ]


@pytest.mark.parametrize("text", LONG, ids=range(len(LONG)))
def test_long_texts_are_encoded_in_blocks(
    both: tuple[BytePairTokens, LibraryTokens], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(byte_pair_tokens, "BLOCK_CHARACTERS", 128)
    monkeypatch.setattr(byte_pair_tokens, "OVERLAP_CHARACTERS", 64)
    require_equal(both, text)
    require_equal(both, f"{text}name  {text}")


@settings(max_examples=30)
@given(parts=st.lists(texts, min_size=8))
def test_any_long_text_is_encoded_in_blocks(both: tuple[BytePairTokens, LibraryTokens], parts: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(byte_pair_tokens, "BLOCK_CHARACTERS", 64)
        patch.setattr(byte_pair_tokens, "OVERLAP_CHARACTERS", 32)
        require_equal(both, "the answer ".join(parts))


def test_a_text_without_a_place_to_split_it_is_refused_if_it_is_huge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digits in groups of three from the right have other groups in each block."""
    library = Tokenizer(models.BPE(vocab={str(digit): digit for digit in range(10)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d{1,3}(?=(\d{3})*$)"), "isolated")
    tokens = BytePairTokens.open(library.to_str().encode())
    assert tokens is not None
    monkeypatch.setattr(byte_pair_tokens, "BLOCK_CHARACTERS", 128)
    monkeypatch.setattr(byte_pair_tokens, "OVERLAP_CHARACTERS", 64)
    assert tokens.encode("7" * 700, frame=False) == [7] * 700
    monkeypatch.setattr(byte_pair_tokens, "MAX_WHOLE_CHARACTERS", 600)
    with pytest.raises(TextNotSplit):
        tokens.encode("7" * 700, frame=False)


def changed(**model: Any) -> bytes:
    whole = json.loads(KINDS["GPT-2"]())
    whole["model"] |= model
    return json.dumps(whole).encode()


def with_added(content: str, token: int) -> bytes:
    whole = json.loads(KINDS["GPT-2"]())
    entry = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    whole["added_tokens"].append({"id": token, "content": content, "special": True, **entry})
    return json.dumps(whole).encode()


VOCABULARY: dict[str, int] = json.loads(KINDS["GPT-2"]())["model"]["vocab"]
OTHERS = {
    "another model": Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).to_str().encode(),
    "random merges": changed(dropout=0.5),
    "a suffix of words": changed(end_of_word_suffix="</w>"),
    "two tokens with one id": changed(vocab=VOCABULARY | {"yess": 7}),
    "an id that no model has": changed(vocab=VOCABULARY | {"yess": 1 << 30}),
    "a whole word whose character is no token": changed(
        ignore_merges=True, vocab=VOCABULARY | {"漢字": len(VOCABULARY)}
    ),
    "an added token with a number that it does not get": with_added("<new>", 5000),
    "an added token of one character": with_added("漢", len(VOCABULARY)),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_the_tables_cannot_express_is_left_to_the_library(kind: str) -> None:
    assert BytePairTokens.open(OTHERS[kind]) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"model": {}}', b'{"model": 1}'])
def test_what_is_no_tokenizer_is_refused_as_by_the_library(content: bytes) -> None:
    assert BytePairTokens.open(content) is None
    with pytest.raises(UserError, match="not a tokenizer"):
        FileTokenizer(content)


@settings(max_examples=200)
@given(data=st.data(), text=texts)
def test_a_damaged_file_is_read_as_by_the_library_or_not(data: st.DataObject, text: str) -> None:
    if data.draw(st.booleans()):
        content = json.dumps(mutated_json(data, json.loads(CONTENTS["framed"]))).encode()
    else:
        content = mutated_bytes(data, CONTENTS["framed"], len(CONTENTS["framed"]))
    tokens = BytePairTokens.open(content)
    if tokens is not None:
        require_equal((tokens, LibraryTokens(content)), text)


def test_merges_may_be_written_in_two_ways() -> None:
    merges = json.loads(CONTENTS["GPT-2"])["model"]["merges"]
    pairs = [merge if isinstance(merge, list) else merge.split(" ") for merge in merges]
    found = [BytePairTokens.open(changed(merges=form)) for form in (pairs, [" ".join(pair) for pair in pairs])]
    assert None not in found
    assert len({tuple(tokens.encode("the answer", frame=False)) for tokens in found if tokens}) == 1


def test_what_would_take_more_memory_than_planned_is_not_read() -> None:
    """The library keeps added tokens; a stranger may add as many as the file holds."""
    library = Tokenizer.from_str(KINDS["GPT-2"]())
    library.add_tokens([f"<added {number}>" for number in range(60_000)])
    content = library.to_str().encode()
    assert 14 * len(content) > tokenizer_bytes(len(content), compact=True)
    assert BytePairTokens.open(content) is None


def test_a_run_refuses_a_tokenizer_that_is_not_what_the_manifest_says() -> None:
    assert FileTokenizer(DEMO_CONTENT, must_be_compact=True).encode("a") == LibraryTokens(DEMO_CONTENT).encode(
        "a", frame=True
    )
    with pytest.raises(UserError, match="compact_tokenizer"):
        FileTokenizer(OTHERS["another model"], must_be_compact=True)


def test_a_long_word_does_not_take_quadratic_time() -> None:
    """A file without a pre-tokenizer has one word, and each merge is found in a heap."""
    tokens = BytePairTokens.open(CONTENTS["Gemma: blanks replaced, runs of them are tokens"])
    assert tokens is not None
    random_text = "".join(random.Random(3).choices("name age", k=1_000_000))
    ids = tokens.encode(random_text, frame=False)
    assert tokens.decode(ids, special=False) == random_text
