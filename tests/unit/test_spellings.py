"""Former spellings, and those of other programs: the old words do what the new ones do, and one line names these."""

from __future__ import annotations

import argparse

import pytest
from neuronpipe.launch.arguments.command_line import parse
from neuronpipe.launch.arguments.spellings import FOREIGN, FOREIGN_VERBS, FORMER, FORMER_VERBS, PACKAGE_WORD
from neuronpipe.launch.arguments.verbs import ALIASES, TWO_WORD_VERBS, VERBS, verb_parser
from neuronpipe.launch.cli import main
from neuronpipe.launch.planning import DEMO
from neuronpipe.protocol.errors import UserError

# verb, former words, present words, what the line shows
FORMER_CASES = [
    ("convert", "a.gguf out", "a.gguf -o out", "`out` is written `-o out`"),
    ("convert", "a.gguf --quantization q8 q8", "a.gguf --quantization q8 -o q8", "`q8` is written `-o q8`"),
    ("synth", "turbosparse-100m out", "turbosparse-100m -o out", "`out` is written `-o out`"),
    ("trace", "/run/a --seconds 1", "--run /run/a --seconds 1", "`/run/a` is written `--run /run/a`"),
    ("perplexity", "--text t --logits-out x.npy", "--text t -o x.npy", "`--logits-out x.npy` is written `-o x.npy`"),
    ("perplexity", "--text t --logits-out=x.npy", "--text t -o x.npy", "`--logits-out x.npy` is written `-o x.npy`"),
    ("profile device", "--svg a.svg", "--picture a.svg", "`--svg a.svg` is written `--picture a.svg`"),
    ("profile diff", "a.json --package p", "a.json p", "`--package p` is written `p`"),
    ("conformance", "--package p decode", "decode p", "`--package p` is written `p`"),
    ("simulate", "oneplus-12 p --trace a.svg", "oneplus-12 p --picture a.svg", "`--trace a.svg` is written `--picture"),
    ("simulate", "oneplus-12 p --trace a.json", "oneplus-12 p -o a.json", "`--trace a.json` is written `-o a.json`"),
]


def parsed(words: list[str]) -> argparse.Namespace:
    """Parse a command line into its options, without its words."""
    arguments = parse(words)
    del arguments.words
    return arguments


@pytest.mark.parametrize(("verb", "former", "present", "line"), FORMER_CASES)
def test_a_former_spelling_does_what_it_did_and_names_the_present_one(
    verb: str, former: str, present: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = parsed([*verb.split(), *former.split()])
    (shown,) = capsys.readouterr().err.splitlines()
    assert line in shown
    assert shown.endswith("now; the former spelling will go")
    assert arguments == parsed([*verb.split(), *present.split()])
    assert capsys.readouterr().err == ""


def test_every_former_spelling_is_tried_and_means_nothing_else() -> None:
    tried = {
        (verb, option) for verb, words, _, _ in FORMER_CASES for option in [w.partition("=")[0] for w in words.split()]
    }
    for row in FORMER:
        assert row.verb in VERBS or row.verb in TWO_WORD_VERBS
        options = verb_parser(row.verb)._option_string_actions
        assert row.option not in options
        assert row.now == PACKAGE_WORD or row.now in options
        assert (row.verb, row.option) in tried or not row.option
    assert {row.verb for row in FORMER if not row.option} <= {verb for verb, *_ in FORMER_CASES}
    assert not {*FORMER_VERBS} & {*VERBS, *ALIASES}


def test_a_former_verb_names_the_present_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed(["cool", "--once"]) == parsed(["throttle", "--once"])
    assert capsys.readouterr().err == "neuronpipe: `cool` is written `throttle` now; the former spelling will go\n"


def test_a_word_too_many_stays_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Where both are given, or where there are two of them, nobody can tell what is meant."""
    for words in (
        ["convert", "a", "b", "c"],
        ["convert", "a", "b", "-o", "c"],
        ["synth", "turbosparse-100m", "b", "c"],
    ):
        with pytest.raises(UserError, match="is one word more than this takes"):
            parse(words)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("run -m p -p x", "run p -p x"),
        ("run hello there -m p", "run p hello there"),
        ("run --model=p -c 4096 -p x", "run p --context 4096 -p x"),
        ("run --ctx-size 9 --n-predict 5 -p x", "run --context 9 -n 5 -p x"),
        (
            "run --temp 0.5 --repeat-penalty 1.1 -s 3 -p x",
            "run --temperature 0.5 --repetition-penalty 1.1 --seed 3 -p x",
        ),
        ("run -t 2 --ignore-eos -no-cnv -p x", "run --workers 2 --ignore-end --raw -p x"),
        ("chat -sys Brief. --format json", "chat --system Brief. --json-schema json"),
        ("serve --keepalive 5m --api-key k -np 2", "serve --keep-alive 5m --key k --sequences 2"),
        ("ls", "list"),
        ("show p", "inspect p"),
    ],
)
def test_options_of_other_programs_do_the_same(theirs: str, ours: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert parsed(theirs.split()) == parsed(ours.split())
    for line in capsys.readouterr().err.splitlines():
        assert line.endswith("` here")


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("run -f file", "`neuronpipe run < FILE`"),
        ("run -ngl 99 -p x", "--backend accelerator=opencl"),
        ("chat -hf a/b", "`neuronpipe pull ORG/NAME`"),
        ("run -i", "`neuronpipe chat`"),
        ("run -m", "-m: expected a value"),
        ("run --model -p x", "--model: expected a value"),
    ],
)
def test_an_option_without_a_counterpart_is_told_what_there_is(words: str, advice: str) -> None:
    with pytest.raises(UserError, match=r"see `neuronpipe (run|chat) --help`") as refused:
        parse(words.split())
    assert advice in str(refused.value)


def test_no_option_of_ours_is_taken_for_another_programs() -> None:
    for verb in (*VERBS, *TWO_WORD_VERBS):
        parser = verb_parser(verb)
        for foreign in FOREIGN:
            for option in {*foreign.options} & {*parser.options}:
                assert option in parser._option_string_actions  # the parser's own wins
    assert parse(["run", "-p", "-5", "--", "-m", "x"]).text == ["x"]


@pytest.mark.parametrize(
    ("words", "package", "prompt"),
    [
        (["plans", "What is 2+2?"], "plans", "What is 2+2?"),
        (["What is 2+2?"], None, "What is 2+2?"),
        (["What is", "-n", "5"], None, "What is"),
        (["-n", "5", "What is"], None, "What is"),
        (["plans", "why", "is", "it"], "plans", "why is it"),
        (["-p", "x", "plans"], "plans", "x"),
        (["What is", "this"], None, "What is this"),
        (["a\nb"], None, "a\nb"),
        (["./my model"], "my model", None),
        (["my model.gguf"], "my model.gguf", None),
        (["one", "-p", "x"], "one", "x"),
        (["one two", "-p", "x"], "one two", "x"),
        ([], None, None),
    ],
)
def test_the_prompt_may_be_the_word_behind_the_model(words: list[str], package: str | None, prompt: str | None) -> None:
    from neuronpipe.launch.arguments.prompt_arguments import join_text

    arguments = parse(["run", *words])
    join_text(arguments)
    assert arguments.prompt == prompt
    assert str(arguments.package) == (package or str(DEMO))
    assert (arguments.package is DEMO) == (package is None)


def test_a_prompt_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["run", "plans", "x", "-p", "y"], ["ask", "x", "-p", "y"], ["run", "a b", "c", "-p", "y"]):
        assert main(words) == 2
        assert "given twice" in capsys.readouterr().err


def test_help_is_a_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["help"]) == 0
    assert "show the contents of a package" in " ".join(capsys.readouterr().out.split())
    for words, verb in ((["run"], "run"), (["profile", "device"], "profile device"), (["show"], "inspect")):
        assert main(["help", *words]) == 0
        assert capsys.readouterr().out.startswith(f"usage: neuronpipe {verb} [options]")
    assert main(["help", "rnu"]) == 2
    assert "did you mean `run`?" in capsys.readouterr().err


def test_the_verbs_of_other_programs_are_told_ours(capsys: pytest.CaptureFixture[str]) -> None:
    for theirs, ours in FOREIGN_VERBS.items():
        assert ours in VERBS or ours == "--version"
        assert main([theirs, "x"]) == 2
        assert f"did you mean `{ours}`?" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--memory", "--gpu-memory"])
@pytest.mark.parametrize(
    ("size", "meant"),
    [("8", "8 bytes; did you mean 8GiB?"), ("512", "512 bytes; did you mean 512MiB?"), ("1.5", "did you mean 1.5GiB?"),
     ("1", "1 byte; did you mean 1GiB?"), ("8KB", "8,000 bytes; did you mean 8GiB?")],
)  # fmt: skip
def test_a_size_without_its_unit_is_asked_for_it(option: str, size: str, meant: str) -> None:
    with pytest.raises(UserError, match=r"See `neuronpipe plan --help`") as refused:
        parse(["plan", option, size])
    assert meant in str(refused.value)


def test_every_option_of_bytes_asks_for_a_forgotten_unit() -> None:
    verbs = [
        (verb, action.option_strings[-1])
        for verb in (*VERBS, *TWO_WORD_VERBS)
        for action in verb_parser(verb)._actions
        if action.metavar == "BYTES"
    ]
    assert len(verbs) > 10
    for verb, option in verbs:
        with pytest.raises(UserError, match="did you mean 8GiB"):
            parse([*verb.split(), f"{option}=8"])
