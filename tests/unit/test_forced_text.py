"""Text that a grammar forces, in tokens of tokenizers that change text by its position or form."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from neuronpipe.services.coordinator.text.grammar import Grammar, Grammars
from neuronpipe.services.coordinator.text.tokenizer import FileTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

pytest.importorskip("llguidance")
MARK = "\u2581"
WORDS = ["name", "age", "Ada", "the", "answer", "is", "yes", "no", "true", "false", "null", '{"', '":', '",', "  ", "é"]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["Ada", "Adam  and Eve", "e\u0301t\u00e9"]}, "end": {"const": "a</s>b <s>"}},
    "required": ["name", "end"],
    "additionalProperties": False,
}


def with_byte_fallback(
    *steps: normalizers.Normalizer, pre: pre_tokenizers.PreTokenizer | None = None, added: str = ""
) -> str:
    """A tokenizer as SentencePiece models have it, with every byte, every letter and some words."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = [chr(code) for code in range(0x21, 0x7F)] + [MARK, "é", "\u0301"]
    names += letters
    merges: list[tuple[str, str]] = []
    for word in [*WORDS, *(MARK + word for word in WORDS), MARK * 2, MARK * 4]:
        word = word.replace(" ", MARK)
        for end in range(2, len(word) + 1):
            if word[:end] not in names:
                names.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    library = Tokenizer(
        models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=merges, byte_fallback=True, unk_token="<unk>")
    )
    if steps:
        library.normalizer = normalizers.Sequence(list(steps))
    if pre is not None:
        library.pre_tokenizer = pre
    library.decoder = decoders.Sequence([decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_tokens([AddedToken(name, normalized=False) for name in added.split()])
    library.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return str(library.to_str())


def with_byte_level(*steps: normalizers.Normalizer, prefix_space: bool = False) -> str:
    """A tokenizer as GPT-2's, with every byte and some words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = ["<s>", "</s>", *alphabet]
    merges: list[tuple[str, str]] = []
    for word in [*WORDS[:11], *("Ġ" + word for word in WORDS[:11])]:
        for end in range(2, len(word) + 1):
            if word[:end] not in names:
                names.append(word[:end])
                merges.append((word[: end - 1], word[end - 1]))
    library = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=merges))
    if steps:
        library.normalizer = normalizers.Sequence(list(steps))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return str(library.to_str())


PREPEND, BLANKS = normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)
KINDS: dict[str, Callable[[], str]] = {
    "Llama 2: a mark before every text": lambda: with_byte_fallback(PREPEND, BLANKS),
    "Mistral: the same by the pre-tokenizer": lambda: with_byte_fallback(
        pre=pre_tokenizers.Metaspace(replacement=MARK, prepend_scheme="first", split=False)
    ),
    "T5: a mark before every word": lambda: with_byte_fallback(
        pre=pre_tokenizers.Metaspace(replacement=MARK, prepend_scheme="always", split=True)
    ),
    "Gemma: blanks replaced, runs of them are tokens": lambda: with_byte_fallback(BLANKS),
    "Gemma 3: the same, and such tokens are added ones": lambda: with_byte_fallback(
        BLANKS, added=f"{MARK * 3} <unused0>"
    ),
    "runs of blanks become one": lambda: with_byte_fallback(
        normalizers.Strip(), normalizers.Replace("  ", " "), PREPEND, BLANKS
    ),
    "Qwen: NFC": lambda: with_byte_level(normalizers.NFC()),
    "NFKC and lower case": lambda: with_byte_level(normalizers.NFKC(), normalizers.Lowercase()),
    "GPT-2": with_byte_level,
    "a space before every text": lambda: with_byte_level(prefix_space=True),
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest) -> FileTokenizer:
    return FileTokenizer(KINDS[request.param]().encode())


def vocabulary_of(tokenizer: FileTokenizer) -> int:
    return tokenizer.tokens.ids


def drawn(grammar: Grammar, tokenizer: FileTokenizer, seed: int, ends: int) -> bytes:
    """A whole text by random tokens among those that may come."""
    chance, text = random.Random(seed), b""
    for _ in range(400):
        bits = int.from_bytes(grammar.allowed, "little")
        allowed = [token for token in range(bits.bit_length()) if bits >> token & 1]
        assert allowed, f"nothing may follow {text!r}"
        token = chance.choice(allowed)
        if token == ends:
            return text
        text += tokenizer.piece(token)
        if grammar.take(token):
            return text
    pytest.fail(f"no end: {text!r}")


@pytest.mark.parametrize("seed", range(4))
def test_a_schema_is_followed_to_its_end(tokenizer: FileTokenizer, seed: int) -> None:
    (end,) = tokenizer.special_tokens[-1:]
    grammars = Grammars(tokenizer, vocabulary_of(tokenizer), [end])
    answer = json.loads(drawn(grammars.start(json.dumps(SCHEMA)), tokenizer, seed, end))
    assert answer["name"] in SCHEMA["properties"]["name"]["enum"]  # type: ignore[index]
    assert answer["end"] == "a</s>b <s>"


@pytest.mark.parametrize(
    ("regex", "syntax"),
    [("(yes|yesterday) the answer", "regex"), ("  two  blanks  ", "regex"), ('root ::= " yes" | " yesno"', "gbnf")],
)
def test_a_common_beginning_is_followed(tokenizer: FileTokenizer, regex: str, syntax: str) -> None:
    (end,) = tokenizer.special_tokens[-1:]
    grammars = Grammars(tokenizer, vocabulary_of(tokenizer), [end])
    texts = {drawn(grammars.start(regex, syntax), tokenizer, seed, end) for seed in range(8)}  # type: ignore[arg-type]
    whole = {
        "(yes|yesterday) the answer": {b"yes the answer", b"yesterday the answer"},
        "  two  blanks  ": {b"  two  blanks  "},
        'root ::= " yes" | " yesno"': {b" yes", b" yesno"},
    }[regex]
    assert texts <= whole
    assert texts


def test_a_token_spells_what_it_is_shown_as(tokenizer: FileTokenizer) -> None:
    (before,) = tokenizer.encode("x", frame=False)[-1:]
    for token in range(vocabulary_of(tokenizer)):
        piece = tokenizer.piece(token)
        if token in tokenizer.special_tokens or not piece.isascii():
            continue
        shown = tokenizer.decode([before, token]).removeprefix(tokenizer.decode([before]))
        assert shown == piece.decode(), token


@pytest.mark.parametrize("text", ['{"name', "e\u0301", "a</s>b", "  two  blanks", "Ada", " Ada", "\n", "\u2581x", "ſ"])
def test_forced_text_is_spelled_by_tokens_of_exactly_its_bytes(tokenizer: FileTokenizer, text: str) -> None:
    grammars = Grammars(tokenizer, vocabulary_of(tokenizer), tokenizer.special_tokens[-1:])
    tokens = grammars.spelled(text.encode())
    assert b"".join(map(tokenizer.piece, tokens)) == text.encode()
    assert not set(tokens) & set(tokenizer.special_tokens)
