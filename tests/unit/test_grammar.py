"""Text that must follow a schema, with the demo's tokenizer; and the bytes of its tokens, against the library's."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from neuronpipe.services.coordinator.text.grammar import Grammar, GrammarError, Grammars
from neuronpipe.services.coordinator.text.tokenizer import FileTokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models

llguidance = pytest.importorskip("llguidance")
PATH = Path(__file__).parents[2] / "plans/demo/package/tokenizer.json"
VOCABULARY, END = 4096, 0
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@pytest.fixture(scope="module")
def tokenizer() -> FileTokenizer:
    return FileTokenizer(PATH.read_bytes())


@pytest.fixture(scope="module")
def grammars(tokenizer: FileTokenizer) -> Grammars:
    return Grammars(tokenizer, VOCABULARY, [END])


def allowed(grammar: Grammar) -> list[int]:
    bits = int.from_bytes(grammar.allowed, "little")
    return [token for token in range(VOCABULARY) if bits >> token & 1]


def follow(grammar: Grammar, tokens: list[int]) -> bool:
    complete = False
    for token in tokens:
        assert not complete
        assert token in allowed(grammar)
        complete = grammar.take(token)
    return complete


def test_a_text_of_the_schema_is_followed_to_its_end(grammars: Grammars, tokenizer: FileTokenizer) -> None:
    assert follow(grammars.start(PERSON), tokenizer.encode('{"name": "Ada", "age": 36}'))


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_drawn_from_the_allowed_tokens_is_json_of_the_schema(
    grammars: Grammars, tokenizer: FileTokenizer, seed: int
) -> None:
    grammar, chance = grammars.start(PERSON), random.Random(seed)
    pieces = b""
    for _ in range(300):
        token = chance.choice(allowed(grammar))
        assert token != END, "an object is over at its brace"
        pieces += tokenizer.piece(token)
        if grammar.take(token):
            break
    person = json.loads(pieces)
    assert set(person) == {"name", "age"}
    assert type(person["age"]) is int
    assert len(person["name"]) <= 8


def test_an_end_token_is_allowed_where_the_text_may_end_and_nowhere_else(
    grammars: Grammars, tokenizer: FileTokenizer
) -> None:
    grammar = grammars.start('{"type": "integer"}')
    assert END not in allowed(grammar)
    assert not follow(grammar, tokenizer.encode("12"))
    assert END in allowed(grammar)


def test_json_is_any_object(grammars: Grammars, tokenizer: FileTokenizer) -> None:
    assert follow(grammars.start("json"), tokenizer.encode('{"a": [1, {"b": null}], "c": "d"}'))
    assert not {*tokenizer.encode("["), *tokenizer.encode("1"), END} & {*allowed(grammars.start("json"))}


def test_spaces_do_not_go_on_for_ever(grammars: Grammars, tokenizer: FileTokenizer) -> None:
    grammar = grammars.start("json")
    (brace,), (line,), (space,) = map(tokenizer.encode, ("{", "\n", " "))
    follow(grammar, [brace, line, *[space] * 16])
    assert not {line, space} & {*allowed(grammar)}
    assert follow(grammar, tokenizer.encode("}"))


def test_two_texts_of_one_schema_do_not_disturb_each_other(grammars: Grammars, tokenizer: FileTokenizer) -> None:
    one, other = grammars.start(PERSON), grammars.start(PERSON)
    before = other.allowed
    follow(one, tokenizer.encode('{"name'))
    assert other.allowed == before == grammars.start(PERSON).allowed


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ("no", "no JSON"),
        ("[1]", "no JSON object"),
        ('{"type": "person"}', "Invalid type"),
        ('{"unevaluatedProperties": 1}', "unevaluatedProperties"),
        ('{"type": "string", "pattern": "(?=x)"}', "look-around"),
        ('{"$ref": "http://example.org/schema"}', "not present"),
        ("false", "no JSON object"),
        ('{"type": "integer", "minimum": 2, "maximum": 1}', "nsatisfiable"),
        ("[" * 60_000, "no JSON"),
        (" " * 70_000, "longer than"),
    ],
    ids=lambda value: value[:20],
)
def test_a_schema_that_cannot_be_compiled_says_why_in_one_line(grammars: Grammars, schema: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason) as caught:
        grammars.start(schema)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_a_tokenizer_whose_names_may_mean_anything_is_an_error_of_the_request() -> None:
    library = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "{": 1, "##}": 2}, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece()
    with pytest.raises(GrammarError, match="this package's tokenizer: its decoder is neither"):
        Grammars(FileTokenizer(library.to_str().encode()), 3, [0]).start("json")


@pytest.mark.parametrize("seed", range(5))
def test_what_may_follow_is_what_the_library_finds_when_it_reads_the_file_itself(grammars: Grammars, seed: int) -> None:
    text = PATH.read_text()
    reading = Grammars(FileTokenizer(text.encode()), VOCABULARY, [END])
    reading.__dict__["_tokens"] = llguidance.LLTokenizer(text, n_vocab=VOCABULARY, eos_token=[END], slices=[])
    ours, theirs, chance = grammars.start(PERSON), reading.start(PERSON), random.Random(seed)
    complete = False
    while not complete:
        assert ours.allowed == theirs.allowed
        token = chance.choice(allowed(ours))
        complete = ours.take(token)
        assert theirs.take(token) == complete


def test_an_id_that_no_token_has_never_follows(tokenizer: FileTokenizer) -> None:
    grammar = Grammars(tokenizer, VOCABULARY + 100, [END]).start('{"type": "string"}')
    follow(grammar, tokenizer.encode('"'))
    bits = int.from_bytes(grammar.allowed, "little")
    assert bits.bit_count() > 1000
    assert bits >> VOCABULARY == 0


def test_a_package_without_end_tokens_has_none_that_may_follow(tokenizer: FileTokenizer) -> None:
    grammar = Grammars(tokenizer, VOCABULARY, []).start('{"type": "integer"}')
    follow(grammar, tokenizer.encode("12"))
    assert END not in allowed(grammar)
    assert follow(Grammars(tokenizer, VOCABULARY, []).start("json"), tokenizer.encode("{}"))


def test_the_bytes_of_every_token_are_those_the_library_knows(tokenizer: FileTokenizer) -> None:
    library = llguidance.LLTokenizer(PATH.read_text(encoding="utf-8"))
    pieces = [tokenizer.piece(token) for token in range(1, VOCABULARY)]
    pieces.remove(b"\xff")  # the library keeps this byte, which is in no text, for itself
    assert pieces == [name for token in range(1, VOCABULARY) if (name := library.decode_bytes([token]))]
    assert tokenizer.piece(END) == b"<|endoftext|>"
    assert tokenizer.piece(VOCABULARY) == b""


def test_pieces_join_to_the_text_they_were_made_of(tokenizer: FileTokenizer) -> None:
    text = "def grüße(Ж):\n\treturn '🙂', \x00 and  spaces"
    assert b"".join(map(tokenizer.piece, tokenizer.encode(text))).decode() == text


def test_names_with_byte_fallback_are_spelled_as_in_sentencepiece(tmp_path: Path) -> None:
    names = ["<unk>", "\u2581", "\u2581a", "<0xC3>", "<0xBC>", "b\u2581c", "</s>"]
    library = Tokenizer(models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[], byte_fallback=True))
    library.add_special_tokens([AddedToken("</s>")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = FileTokenizer((tmp_path / "tokenizer.json").read_bytes())
    pieces = [tokenizer.piece(token) for token in range(1, 7)]
    assert pieces == [b" ", b" a", b"\xc3", b"\xbc", b"b c", b"</s>"]
