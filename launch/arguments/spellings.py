"""Words that are written in another way now, or here: what this program once took, and what llama.cpp and Ollama take.

A former spelling does what it did, and stderr names the present one in one line. CONTRIBUTING.md says when a row is
added and when it may go. An option of another program does the same where this one has its counterpart; where it has
none, the error says what there is instead.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Container, Sequence

from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

PACKAGE_WORD = "package"
"""In place of an option: the value is the word PACKAGE."""


@frozen
class Former:
    """An option, or a further word, that a verb took under another spelling.

    verb: the verb that took it
    option: the former option; empty: a word behind those that the verb still takes
    now: the option that takes the value now, or PACKAGE_WORD
    since: the date of the change, ISO
    suffix: the row is of values that end so
    """

    verb: str
    option: str
    now: str
    since: str
    suffix: str = ""


FORMER = (
    Former("convert", "", "-o", "2026-11-24"),
    Former("synth", "", "-o", "2026-11-24"),
    Former("trace", "", "--run", "2026-11-21"),
    Former("perplexity", "--logits-out", "-o", "2026-11-24"),
    Former("profile device", "--svg", "--picture", "2026-11-24"),
    Former("profile diff", "--package", PACKAGE_WORD, "2026-11-24"),
    Former("conformance", "--package", PACKAGE_WORD, "2026-11-24"),
    Former("simulate", "--trace", "--picture", "2026-11-24", suffix=".svg"),
    Former("simulate", "--trace", "-o", "2026-11-24"),
)

FORMER_VERBS = {"cool": "throttle"}
"""Verbs that have another name now."""

FOREIGN_VERBS = {
    "create": "convert",
    "quantize": "convert",
    "server": "serve",
    "generate": "run",
    "cli": "chat",
    "start": "up",
    "download": "pull",
    "install": "pull",
    "remove": "rm",
    "delete": "rm",
    "models": "list",
    "version": "--version",
}
"""What other programs call a verb: not taken, but what is meant is named."""


@frozen
class Foreign:
    """Options of other programs for one thing. now: this program's option for it, PACKAGE_WORD, or empty where it has
    none. advice: what to do then."""

    options: tuple[str, ...]
    now: str = ""
    advice: str = ""


FOREIGN = (
    Foreign(("-m", "--model"), PACKAGE_WORD),
    Foreign(("-c", "--ctx-size", "--num-ctx"), "--context"),
    Foreign(("-t", "--threads"), "--workers"),
    Foreign(("-np", "--parallel"), "--sequences"),
    Foreign(("--n-predict", "--predict", "--num-predict"), "--max-tokens"),
    Foreign(("--repeat-penalty",), "--repetition-penalty"),
    Foreign(("-s",), "--seed"),
    Foreign(("-sys", "--system-prompt"), "--system"),
    Foreign(("--ignore-eos",), "--ignore-end"),
    Foreign(("-no-cnv", "--no-conversation"), "--raw"),
    Foreign(("--format",), "--json-schema"),
    Foreign(("--keepalive",), "--keep-alive"),
    Foreign(("--api-key",), "--key"),
    Foreign(("-f", "--file"), advice="a prompt comes from a file through standard input: `neuronpipe run < FILE`"),
    Foreign(("-hf", "--hf-repo"), advice="`neuronpipe pull ORG/NAME` gets a model, which every verb takes by its name"),
    Foreign(("-i", "-cnv", "--interactive", "--conversation"), advice="`neuronpipe chat` holds a conversation"),
    Foreign(
        ("-ngl", "--gpu-layers", "--n-gpu-layers"),
        advice="--backend accelerator=opencl has a GPU compute, and the plan says how much",
    ),
    Foreign(("--mlock", "--no-mmap"), advice="the plan says what stays in memory; --memory BYTES limits it"),
    Foreign(("--jinja",), advice="chat templates are used wherever a model has one; leave it out"),
    Foreign(("--verbose",), advice="speed and memory are shown behind every text, more of it with --json"),
)


def in_present_words(words: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """The words behind a verb as they are written now and here, and one line for each that was written otherwise.

    words: the verb, then its words
    Raises UserError for an option of another program that has no counterpart, or that lacks its value.
    """
    verb, present, package, lines = words[0], list[str](), None, list[str]()
    rest = list(words[1:])
    while rest:
        word = rest.pop(0)
        if word == "--":
            present += [word, *rest]
            break
        option, equals, value = word.partition("=")
        now, is_former = _counterpart(verb, option, value if equals else next(iter(rest), ""), parser)
        if now is None:
            present.append(word)
            continue
        values = [value] if equals else []
        if not equals and (now == PACKAGE_WORD or parser._option_string_actions[now].nargs != 0):
            if not rest or rest[0].startswith("-"):
                raise UserError(f"{option}: expected a value; see `{parser.prog} --help`")
            values = [rest.pop(0)]
        if now == PACKAGE_WORD:
            package = values[0]
        else:
            long = parser._option_string_actions[now].option_strings[-1]
            present.append("=".join([long, *values]))
        lines.append(_line([option, *values], [] if now == PACKAGE_WORD else [now], values, is_former))
    if package is not None:
        present = [package, *present] if _takes_package_first(parser) else [*present, package]
    return [verb, *present], lines


def take_former_word(
    verb: str, unknown: Sequence[str], arguments: argparse.Namespace, parser: argparse.ArgumentParser
) -> str | None:
    """Give a word too many to the option that has its value now, where the verb once took such a word. Returns the line
    that names the option; None: the word means nothing, or the option was given as well."""
    row = next((row for row in FORMER if row.verb == verb and not row.option), None)
    if row is None or len(unknown) != 1 or unknown[0].startswith("-"):
        return None
    action = parser._option_string_actions[row.now]
    if getattr(arguments, action.dest) != parser.get_default(action.dest):
        return None
    setattr(arguments, action.dest, parser._get_value(action, unknown[0]))
    return _line([unknown[0]], [row.now], [unknown[0]], is_former=True)


def _counterpart(verb: str, option: str, value: str, parser: argparse.ArgumentParser) -> tuple[str | None, bool]:
    """What takes the option's value, and whether the option is a former one of the verb; None: it means nothing else.
    Raises UserError with the advice for an option of another program."""
    known: Container[str] = parser._option_string_actions
    if option in known or not option.startswith("-"):
        return None, False
    for row in FORMER:
        if (row.verb, row.option) == (verb, option) and value.endswith(row.suffix):
            return row.now, True
    for foreign in FOREIGN:
        if option in foreign.options:
            if foreign.advice and _takes_package(parser):
                raise UserError(f"there is no option {option!r}: {foreign.advice}; see `{parser.prog} --help`")
            if foreign.now in known or (foreign.now == PACKAGE_WORD and _takes_package(parser)):
                return foreign.now, False
    return None, False


def _words(parser: argparse.ArgumentParser) -> list[str]:
    return [action.dest for action in parser._actions if not action.option_strings]


def _takes_package(parser: argparse.ArgumentParser) -> bool:
    return PACKAGE_WORD in _words(parser)


def _takes_package_first(parser: argparse.ArgumentParser) -> bool:
    return _words(parser)[:1] == [PACKAGE_WORD]


def _line(before: Sequence[str], now: Sequence[str], values: Sequence[str], is_former: bool) -> str:
    written = f"`{shlex.join(before)}` is written `{shlex.join([*now, *values])}`"
    return f"{written} now; the former spelling will go" if is_former else f"{written} here"
