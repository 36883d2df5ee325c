"""A byte-pair encoding that is read into tables gives the ids of the `tokenizers` library."""

from __future__ import annotations

import contextlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.package import byte_pair_tokens, text_blocks
from neuronpipe.plans.package.byte_pair_tokens import BytePairTokens, TextNotSplit
from neuronpipe.plans.package.tokenizer import Panic
from neuronpipe.protocol.errors import UserError
from neuronpipe.services.coordinator.text.tokenizer import FileTokenizer, LibraryTokens
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

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
    small_blocks(monkeypatch)
    require_equal(both, text)
    require_equal(both, f"{text}name  {text}")


@settings(max_examples=30)
@given(parts=st.lists(texts, min_size=8))
def test_any_long_text_is_encoded_in_blocks(both: tuple[BytePairTokens, LibraryTokens], parts: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_blocks, "BLOCK_CHARACTERS", 64)
        patch.setattr(text_blocks, "OVERLAP_CHARACTERS", 32)
        require_equal(both, "the answer ".join(parts))


def opened(library: Tokenizer, **model: Any) -> tuple[BytePairTokens, LibraryTokens]:
    whole = json.loads(library.to_str())
    whole["model"] |= model
    content = json.dumps(whole).encode()
    tokens = BytePairTokens.open(content)
    assert tokens is not None
    return tokens, LibraryTokens(content)


def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_blocks, "BLOCK_CHARACTERS", 128)
    monkeypatch.setattr(text_blocks, "OVERLAP_CHARACTERS", 64)


def test_a_text_without_a_place_to_split_it_is_refused_if_it_is_huge(monkeypatch: pytest.MonkeyPatch) -> None:
    """Digits in groups of three from the right have other groups in each block."""
    library = Tokenizer(models.BPE(vocab={str(digit): digit for digit in range(10)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d{1,3}(?=(\d{3})*$)"), "isolated")
    tokens, _ = opened(library)
    small_blocks(monkeypatch)
    assert tokens.encode("7" * 700, frame=False) == [7] * 700
    monkeypatch.setattr(byte_pair_tokens, "MAX_WHOLE_CHARACTERS", 600)
    with pytest.raises(TextNotSplit):
        tokens.encode("7" * 700, frame=False)


FAR = {
    "a word that another rule would split": (
        r"[^\s\p{L}]+[\r\n/]*|\s*[\r\n]+|\s+|\p{L}+",
        None,
        "/" + "\n" * 900 + "/a",
    ),
    "marks that change places": (r"[\s\S]", normalizers.NFC(), "a" + "\u0301" * 900 + "\u0316" * 9 + " b"),
    "a look far ahead": (r"ax(?=[^!]*!)|[\s\S]", None, "ax" * 300 + "a" * 60 + "!"),
}


@pytest.mark.parametrize("kind", FAR)
def test_blocks_see_what_decides_far_away(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, normalizer, text = FAR[kind]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "/"), ("a", "x"), ("Ċ", "Ċ")]
    names = [*alphabet, *("".join(pair) for pair in merges)]
    library = Tokenizer(models.BPE({name: token for token, name in enumerate(names)}, merges))
    if normalizer is not None:
        library.normalizer = normalizer
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), level])
    small_blocks(monkeypatch)
    for begin in range(40):
        require_equal(opened(library), "b " * begin + text)


def test_the_patterns_of_published_tokenizers_allow_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`$` and `^` in classes of characters are no ends of the text."""
    library = Tokenizer.from_str(KINDS["GPT-2"]())
    pattern = r"\p{N}{1,3}|[!\"#$%^_\[\]]+|[^\r\n\p{L}\p{N}]?\p{L}+(?i:'s|'t)?|\s*[\r\n]+|\s+(?!\S)|\s+"
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), level])
    small_blocks(monkeypatch)
    monkeypatch.setattr(byte_pair_tokens, "MAX_WHOLE_CHARACTERS", 0)
    require_equal(opened(library), "the answer's 1234 $^ [yes]\n\n  no " * 40)


def test_a_vocabulary_without_rare_bytes_allows_blocks_for_texts_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolLM2's vocabulary lacks 21 bytes: texts of more than 16,384 characters were refused."""
    whole = json.loads(KINDS["GPT-2"]())
    alphabet = text_blocks.bytes_by_character()
    lacking = {character for character, byte in alphabet.items() if byte in (0x04, 0xC0, 0xF1, 0xFF)}
    vocabulary = sorted(set(whole["model"]["vocab"]) - lacking, key=whole["model"]["vocab"].__getitem__)
    model = {"vocab": {name: token for token, name in enumerate(vocabulary)}}
    whole["added_tokens"], whole["post_processor"] = [], None
    both = opened(Tokenizer.from_str(json.dumps(whole | {"model": whole["model"] | model})))
    small_blocks(monkeypatch)
    require_equal(both, "the answer\x04 is \U00040000yes " * 40)
    monkeypatch.setattr(byte_pair_tokens, "MAX_WHOLE_CHARACTERS", 0)
    require_equal(both, "the answer \x05is yes\n\U00030000🙂 " * 40)
    for dropped in "\x04\U00040000":
        with pytest.raises(TextNotSplit):
            both[0].encode("the answer is yes " * 40 + dropped, frame=False)
    usual = whole["model"] | {"vocab": {name: token for name, token in model["vocab"].items() if name != "e"}}
    assert text_blocks.splits_locally(whole | {"model": usual}, usual["vocab"]) is None


def test_a_word_that_is_longer_than_an_overlap_does_not_end_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Tokenizer.from_str(KINDS["GPT-2"]())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    small_blocks(monkeypatch)
    monkeypatch.setattr(text_blocks, "BLOCK_CHARACTERS", 512)
    monkeypatch.setattr(byte_pair_tokens, "MAX_WHOLE_CHARACTERS", 0)
    for length in range(40, 300, 20):
        require_equal(opened(library), ("the answer " * 30 + "=" * length + " ") * 5)


def test_a_hostile_text_takes_as_many_blocks_as_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Words that are as long as a block may be: each would need several tries, and bring little of the text."""
    tokens, _ = opened(Tokenizer.from_str(KINDS["GPT-2"]()))
    monkeypatch.setattr(text_blocks, "MIN_TRIES", 0)
    asked = []
    split = tokens._split
    monkeypatch.setattr(tokens, "_split", lambda text, *, frame: asked.append(len(text)) or split(text, frame=frame))
    text = ("a " * 500 + "=" * 7_000) * 30
    with pytest.raises(TextNotSplit):
        tokens.encode(text, frame=False)
    assert len(asked) <= 3 * len(text) // 7_168 + 1


def test_a_long_added_token_is_found_across_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Tokenizer(models.BPE({"a": 0, "b": 1, "<unk>": 2}, [], unk_token="<unk>"))
    library.add_tokens([AddedToken("c" + "ab" * 100, normalized=False)])
    small_blocks(monkeypatch)
    require_equal(opened(library), ("c" + "ab" * 300) * 3)


def test_a_text_is_framed_whatever_its_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Tokenizer(models.BPE({name: token for token, name in enumerate("0123456789 ")}, []))
    library.add_special_tokens(["<s>", "</s>"])
    ends = [(name, library.token_to_id(name)) for name in ("<s>", "</s>")]
    library.post_processor = processors.TemplateProcessing("<s> $A </s>", special_tokens=ends)
    small_blocks(monkeypatch)
    require_equal(opened(library, unk_token="0"), "12 " * 100)


def test_a_character_that_becomes_nothing_shifts_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    for count in range(1, 40):
        require_equal(opened(Tokenizer(models.BPE({"a": 0, "b": 1}, []))), "é" * count + "ab" * 300)


@pytest.mark.parametrize(
    "normalizer", [normalizers.Lowercase(), normalizers.Prepend("_"), normalizers.Replace(" ", "_")]
)
def test_normalized_added_tokens_have_the_librarys_names(normalizer: normalizers.Normalizer) -> None:
    library = Tokenizer(models.BPE({name: token for token, name in enumerate(["a", "b", "_", "<unk>"])}, []))
    library.normalizer = normalizer
    library.add_tokens([AddedToken("<I M>", normalized=True)])
    library.add_special_tokens([AddedToken("<S>", normalized=True)])
    both = opened(library, unk_token="<unk>")
    require_equal(both, "a <I M> b<S><i m>")
    assert [both[0].name(token) for token in range(8)] == [both[1].name(token) for token in range(8)]


def test_a_whole_word_is_not_told_by_names_of_bytes_or_of_the_unknown_token() -> None:
    names = ["n", "a", "<unk>", "n<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "<0xC3><0xA9>"]
    spelled = [*names, *sorted({*"".join(names)} - {"n", "a"})]
    vocabulary = {name: token for token, name in enumerate(spelled)}
    for options in ({"unk_token": "<unk>"}, {"byte_fallback": True}):
        require_equal(opened(Tokenizer(models.BPE(vocabulary, [])), ignore_merges=True, **options), "né")


def changed(**model: Any) -> bytes:
    whole = json.loads(KINDS["GPT-2"]())
    whole["model"] |= model
    return json.dumps(whole).encode()


def with_added(*contents: str, first: int | None = None, **model: Any) -> bytes:
    whole = json.loads(changed(**model))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    number = len(whole["model"]["vocab"]) if first is None else first
    whole["added_tokens"] += [
        {"id": number + n, "content": content, "special": True, **flags} for n, content in enumerate(contents)
    ]
    return json.dumps(whole).encode()


def with_template(*pieces: dict[str, Any]) -> bytes:
    whole = json.loads(KINDS["GPT-2"]())
    template = {"type": "TemplateProcessing", "single": list(pieces), "pair": [], "special_tokens": {}}
    return json.dumps(whole | {"post_processor": {"type": "Sequence", "processors": [template]}}).encode()


A_TEXT = {"Sequence": {"id": "A", "type_id": 0}}
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
    "an added token with a number that it does not get": with_added("<new>", first=5000),
    "an added token of one character": with_added("漢"),
    "two added tokens of one name": with_added("<new>", "<new>"),
    "an added token that is the unknown one": with_added("<new>", unk_token="<new>"),
    "bytes that are added tokens": with_added(*(f"<0x{byte:02X}>" for byte in range(256)), byte_fallback=True),
    "a merge that the library skips": changed(
        merges=["#version a"], vocab=VOCABULARY | {"#version": 999, "#versiona": 998}
    ),
    "a wrong value of what the library does not see": changed(ignore_merges=-1),
    "a template that has the text twice": with_template(A_TEXT, A_TEXT),
    "a template without the text": with_template(),
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
        with contextlib.suppress(Panic):  # of the library, as of a template that names no token
            require_equal((tokens, LibraryTokens(content)), text)


def test_merges_may_be_written_in_two_ways() -> None:
    merges = json.loads(CONTENTS["GPT-2"])["model"]["merges"]
    pairs = [merge if isinstance(merge, list) else merge.split(" ") for merge in merges]
    found = [BytePairTokens.open(changed(merges=form)) for form in (pairs, [" ".join(pair) for pair in pairs])]
    assert None not in found
    assert len({tuple(tokens.encode("the answer", frame=False)) for tokens in found if tokens}) == 1


def hostile(kind: str) -> bytes:
    """What a stranger may add to a file: each would take many times its bytes."""
    library = Tokenizer.from_str(KINDS["GPT-2"]())
    if kind == "added tokens":
        library.add_tokens([f"<added {number}>" for number in range(60_000)])
    if kind == "long added tokens":
        library.add_tokens(["".join(random.Random(number).choices(ASCII, k=1500)) for number in range(100)])
    whole = json.loads(library.to_str())
    if kind == "lists":
        whole["lists"] = [[]] * 1_000_000
    if kind == "characters":
        whole["model"]["vocab"] |= {chr(0x20000 + n): 1000 + n for n in range(60_000)}
    return json.dumps(whole, separators=(",", ":"), ensure_ascii=False).encode()


ASCII = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"


@pytest.mark.parametrize("kind", ["added tokens", "long added tokens", "lists", "characters"])
def test_what_would_take_more_memory_than_planned_is_not_read(kind: str) -> None:
    assert BytePairTokens.open(hostile(kind)) is None


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
