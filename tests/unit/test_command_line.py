"""What the command line says to words that mean nothing: one line, exit code 2, and what was probably meant."""

from __future__ import annotations

import io
import re

import pytest
from neuronpipe.launch import progress
from neuronpipe.launch.arguments.verbs import TWO_WORD_VERBS, VERBS, verb_parser
from neuronpipe.launch.cli import main
from neuronpipe.launch.planning import DEMO


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line with which these words are refused."""
    assert main(list(words)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith("neuronpipe: ")
    return line.removeprefix("neuronpipe: ")


@pytest.mark.parametrize(
    ("word", "meant"),
    [("stauts", "status"), ("RUN", "run"), ("doc", "doctor"), ("con", "convert"), ("perplexty", "perplexity")],
)
def test_a_mistyped_verb_names_the_nearest(capsys: pytest.CaptureFixture[str], word: str, meant: str) -> None:
    assert f"{word!r} is not a verb; did you mean `{meant}`?" in refused(capsys, word)


def test_a_verb_like_no_other_names_them_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert "the verbs are run, chat, serve, up, ask" in refused(capsys, "xyzzy")


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (("run", "--memroy", "1GiB", "-p", "x"), "--memory"),
        (("convert", "--quantisation=q8", "a"), "--quantization"),
        (("ask", "--temprature", "0"), "--temperature"),
        (("bench", "--reps", "2"), "--repetitions"),
    ],
)
def test_an_unknown_option_names_the_nearest_and_its_verbs_help(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], meant: str
) -> None:
    option = words[1].partition("=")[0]
    said = refused(capsys, *words)
    assert said == f"there is no option {option!r}; did you mean `{meant}`? See `neuronpipe {words[0]} --help`"


def test_an_option_like_no_other_and_a_word_too_many(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "down", "--frobnicate") == (
        "there is no option '--frobnicate'; see `neuronpipe down --help`"
    )
    assert refused(capsys, "down", "now") == "'now' is one word more than this takes; see `neuronpipe down --help`"


@pytest.mark.parametrize(
    "words",
    [
        ("conformance", "decode", "--patience", "5", "no-such-package"),
        ("conformance", "--patience", "5", "decode", "no-such-package"),
        ("conformance", "decode", "no-such-package", "--patience", "5"),
    ],
)
def test_a_word_that_may_be_left_out_stands_before_options_or_behind_them(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert "no-such-package: no such package directory" in refused(capsys, *words)


OUTPUTS = re.compile(r"(write|save|draw|make)\b|.* to make\b|where they go\b")
"""How the help begins of what a verb writes."""


@pytest.mark.parametrize("verb", [*VERBS, *TWO_WORD_VERBS])
def test_packages_outputs_pictures_and_runs_have_the_same_names_in_every_verb(verb: str) -> None:
    for action in verb_parser(verb)._actions:
        names, shown, meaning = tuple(action.option_strings), str(action.metavar), action.help or ""
        if not names:
            assert not OUTPUTS.match(meaning), f"{shown}: what a verb makes goes to -o"
            continue
        assert action.dest != "package", f"{names}: a package is a word"
        assert "PACKAGE" not in shown, f"{names}: a package is a word"
        if shown == "FILE.svg" or meaning.startswith("draw"):
            assert (names, shown) == (("--picture",), "FILE.svg")
        elif "-o" in names or action.dest == "output" or OUTPUTS.match(meaning):
            assert names == ("-o", "--output") or (verb, *names) == ("synth", "--gguf")
        elif "run directory" in meaning or meaning.startswith("directory of a live run"):
            assert (names, shown) == (("--run",), "DIR")


def test_a_word_in_place_of_a_number_is_told_so_in_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "run", "-p", "x", "--temperature", "hot").startswith(
        "argument --temperature: 'hot' is not a number; see"
    )
    assert "argument -n/--max-tokens: '1.5' is not a whole number; see" in refused(
        capsys, "run", "-p", "x", "-n", "1.5"
    )


def test_what_is_missing_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "simulate").startswith("the following arguments are required: DEVICE (one of oneplus-12, ")
    assert "required: --text (the text to score, UTF-8); see" in refused(capsys, "perplexity")
    assert "required: shell (one of bash, zsh, fish); see" in refused(capsys, "completion")


def test_the_demo_is_not_changed_by_whoever_names_no_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert "profile: name the package to change" in refused(capsys, "profile")
    assert "profile: name the package to change" in refused(capsys, "profile", "--activity")
    assert "compile: name the package" in refused(capsys, "compile")


def test_an_option_before_its_verb_is_shown_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    assert "options come after the verb, as in `neuronpipe status -h`" in refused(capsys, "--json", "status")


def test_a_long_word_is_cut_where_it_is_quoted(capsys: pytest.CaptureFixture[str]) -> None:
    long = "y" * 5000
    for words in (
        ("convert", "a", "--quantization", long),
        ("run", "-n", long),
        ("run", f"--{long}"),
        ("run", "--memory", long),
        (long,),
        ("down", long),
    ):
        assert len(refused(capsys, *words)) < 400


@pytest.mark.parametrize(
    ("option", "value", "between"),
    [
        ("--temperature", "101", "between 0 and 100"),
        ("--temperature", "nan", "between 0 and 100"),
        ("--top-k", "-1", "between 0 and 2,147,483,647"),
        ("--top-p", "-0.1", "between 0 and 1"),
        ("--min-p", "2", "between 0 and 1"),
        ("--repetition-penalty", "0", "between 0.01 and 100"),
        ("--frequency-penalty", "-101", "between -100 and 100"),
        ("--seed", "-1", "between 0 and 9,223,372,036,854,775,807"),
        ("--max-tokens", "0", "between 1 and 16,777,216"),
        ("--logit-bias", "5=nan", "between -100 and 100"),
    ],
)
def test_a_value_out_of_range_is_told_the_range(
    capsys: pytest.CaptureFixture[str], option: str, value: str, between: str
) -> None:
    said = refused(capsys, "run", "-p", "x", f"{option}={value}")
    assert said.startswith(option)
    assert between in said


@pytest.mark.parametrize("option", ["-p", "--stop", "--json-schema"])
def test_a_text_that_is_no_utf8_is_refused(capsys: pytest.CaptureFixture[str], option: str) -> None:
    for verb in ("run", "ask"):
        assert "not UTF-8" in refused(capsys, verb, option, b"\xe9t\xe9".decode(errors="surrogateescape"))


def test_a_pipe_that_never_ends_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("a" * (5 << 20)))
    assert "more than 4,194,304 characters" in refused(capsys, "run")


@pytest.mark.parametrize("verb", ["run", "up", "serve", "plan", "bench", "perplexity"])
@pytest.mark.parametrize(
    "asked",
    [
        ("--memory", "1GiB"),
        ("--target-speed", "10"),
        ("--quality", "predicted"),
        ("--cores", "0"),
        ("--ffn-resident", "50%"),
        ("--context", "64"),
        ("--kv-type", "q8"),
        ("--kv-type", "f16"),
        ("--sequences", "2"),
        ("--workers", "1"),
        ("--mode", "exact"),
        ("--without", "prefetch"),
        ("--baseline", "llm-in-a-flash"),
    ],
)
def test_a_plan_and_what_contradicts_it_are_refused_together(
    capsys: pytest.CaptureFixture[str], verb: str, asked: tuple[str, str]
) -> None:
    needed = {"run": ("-p", "x"), "perplexity": ("--text", "corpus.txt")}.get(verb, ())
    said = refused(capsys, verb, *needed, "--plan", "plan.json", *asked)
    assert said == f"{asked[0]} and --plan plan.json: the plan decides that; leave one of the two out"


@pytest.mark.parametrize(
    ("asked", "other"),
    [
        (("--mode", "exact"), "--mode exact"),
        (("--mode", "predicted"), "--mode predicted"),
        (("--baseline", "llm-in-a-flash"), "--baseline llm-in-a-flash"),
        (("--hints",), "--hints"),
        (("--without", "predictor"), "--without predictor"),
    ],
)
def test_a_quality_and_what_decides_the_mode_are_refused_together(
    capsys: pytest.CaptureFixture[str], asked: tuple[str, ...], other: str
) -> None:
    said = refused(capsys, "plan", "--quality", "1%", *asked)
    assert said == f"{other} and --quality 1%: the former decides the mode; leave one of the two out"


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        (("--target-speed", "10"), "--target-speed 10.0: a baseline is planned for a memory limit"),
        (("--mode", "exact"), "--mode exact: a baseline computes in mode predicted"),
        (("--hints",), "--hints: a baseline does not prefetch"),
    ],
)
def test_a_baseline_and_what_it_is_not_are_refused_together(
    capsys: pytest.CaptureFixture[str], asked: tuple[str, ...], why: str
) -> None:
    said = refused(capsys, "plan", "--baseline", "llm-in-a-flash", *asked)
    assert said == f"--baseline llm-in-a-flash and {why}; leave one of the two out"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("--target-speed", "0"), "'0' is not a speed; write tokens per second, e.g. 10"),
        (("--target-speed", "nan"), "'nan' is not a speed"),
        (("--quality", "best"), "'best': write exact, predicted, or the allowed rise in perplexity, e.g. 1%"),
        (("--cores", "1-0"), "'1-0' is not a list of cores; write 0,2-3"),
        (("--cores", "a"), "'a' is not a list of cores"),
        (("--cores", "9999"), "--cores: core 9999 is none that this process may use; these are 0"),
        (("--target-speed", "1e12"), "--target-speed 1e+12: "),
        (("--target-speed", "1000000"), "--target-speed 1000000: the most that is expected"),
        (("--context", "0"), "--context 0: between 1 and 512, the package's context"),
        (("--context", "1.5"), "'1.5' is not a whole number; write e.g. 4"),
        (("--workers", "two"), "'two' is not a whole number"),
        (("--memory", "1XB"), "'1XB' is not a size; write bytes, or a number with MiB or GiB, or auto"),
        (("--memory", "2EiB"), "'2EiB': a size must be above zero, and up to 1 EiB"),
        (("--memory", "0"), "'0': a size must be above zero, and up to 1 EiB"),
        (("--memory", "inf"), "'inf' is not a size"),
    ],
)
def test_a_wish_that_cannot_be_met_is_told_what_can(
    capsys: pytest.CaptureFixture[str], words: tuple[str, str], complaint: str
) -> None:
    assert complaint in refused(capsys, "plan", *words)


def test_a_size_beyond_all_numbers_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "a size must be above zero, and up to 1 EiB" in refused(capsys, "plan", "--memory", "9" * 400 + "G")


def test_a_name_that_is_too_long_for_a_file_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "SILENT_S", float("inf"))
    assert "File name too long" in refused(capsys, "profile", str(DEMO), "--import", "x" * 5000)


def test_an_address_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "not a whole invitation" in refused(capsys, "watch", "tcp://[:1", "--once")


@pytest.mark.parametrize("word", ["--max-tokens=--", "-n=--", "-n--"])
def test_two_dashes_are_no_value(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", word, "hi"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "expected one argument, and -- is none" in line
