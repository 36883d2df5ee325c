"""Former spellings of this program, and spellings of llama.cpp and Ollama.

A former spelling keeps working, and stderr names the current one in one line; CONTRIBUTING.md says when a row is added
and removed. An option of another program does the same if there is an equivalent here; otherwise the error names the
alternative. The exchange happens before the parser sees the words, so that help, completion and manual list current
spellings only.
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Container, Sequence

from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

PACKAGE_WORD = "package"
"""Stands for an option: the value is the word PACKAGE."""


@frozen
class Former:
    """An option or word that a verb took under another spelling.

    verb: the verb that took it
    option: the former option; empty: one word more than the verb takes now
    now: the option that takes the value now, or PACKAGE_WORD
    since: the date of the change, ISO
    suffix: the row applies to values with this ending
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
"""Former names of verbs, and their current names."""

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
    "version": "--version",
}
"""Names of verbs in other programs. They are not accepted, but the error suggests the equivalent."""


@frozen
class Foreign:
    """Options of other programs with one meaning.

    now: the equivalent option here, PACKAGE_WORD, or empty if there is none
    advice: the alternative if there is none
    """

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
    Foreign(("-f", "--file"), advice="pipe a file into standard input: `neuronpipe run < FILE`"),
    Foreign(
        ("-hf", "--hf-repo"), advice="`neuronpipe pull ORG/NAME` downloads a model, which every verb takes by name"
    ),
    Foreign(("-i", "-cnv", "--interactive", "--conversation"), advice="`neuronpipe chat` holds a conversation"),
    Foreign(
        ("-ngl", "--gpu-layers", "--n-gpu-layers"),
        advice="--backend accelerator=opencl uses a GPU, and the plan chooses how much it computes",
    ),
    Foreign(("--mlock", "--no-mmap"), advice="the plan chooses what stays in memory; --memory BYTES limits it"),
    Foreign(("--jinja",), advice="the chat template is always used if the model has one; leave the option out"),
    Foreign(("--verbose",), advice="speed and memory are shown after every answer, more of it with --json"),
)


def translate(words: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """Return the words in current spellings, and one line for each former or foreign spelling.

    words: the verb and its words

    Raises UserError for an option of another program that has no equivalent or lacks its value.
    """
    verb, translated, package, lines = words[0], list[str](), None, list[str]()
    remaining = list(words[1:])
    while remaining:
        word = remaining.pop(0)
        if word == "--":
            translated += [word, *remaining]
            break
        option, equals, value = word.partition("=")
        current, is_former = _equivalent(verb, option, value if equals else next(iter(remaining), ""), parser)
        if current is None:
            translated.append(word)
            continue
        values = [value] if equals else []
        if not equals and (current == PACKAGE_WORD or parser._option_string_actions[current].nargs != 0):
            if not remaining or remaining[0].startswith("-"):
                raise UserError(f"{option}: expected a value; see `{parser.prog} --help`")
            values = [remaining.pop(0)]
        if current == PACKAGE_WORD:
            package = values[0]
        else:
            long = parser._option_string_actions[current].option_strings[-1]
            translated.append("=".join([long, *values]))
        lines.append(_line([option, *values], [] if current == PACKAGE_WORD else [current], values, is_former))
    if package is not None:
        translated = [package, *translated] if _takes_package_first(parser) else [*translated, package]
    return [verb, *translated], lines


def take_former_word(
    verb: str, unknown: Sequence[str], arguments: argparse.Namespace, parser: argparse.ArgumentParser
) -> str | None:
    """Store one word too many as the value of an option, if the verb once took such a word.

    Returns the line that names the option; None if there is no such option, or it was typed as well.
    """
    row = next((row for row in FORMER if row.verb == verb and not row.option), None)
    if row is None or len(unknown) != 1 or unknown[0].startswith("-"):
        return None
    action = parser._option_string_actions[row.now]
    if getattr(arguments, action.dest) != parser.get_default(action.dest):
        return None
    setattr(arguments, action.dest, parser._get_value(action, unknown[0]))
    return _line([unknown[0]], [row.now], [unknown[0]], is_former=True)


def _equivalent(verb: str, option: str, value: str, parser: argparse.ArgumentParser) -> tuple[str | None, bool]:
    """Return the current option for a former or foreign one, or None; and whether it is a former one of the verb.

    Raises UserError with the advice for an option of another program without an equivalent.
    """
    current_options: Container[str] = parser._option_string_actions
    if option in current_options or not option.startswith("-"):
        return None, False
    for row in FORMER:
        if (row.verb, row.option) == (verb, option) and value.endswith(row.suffix):
            return row.now, True
    for foreign in FOREIGN:
        if option in foreign.options:
            if foreign.advice and _takes_package(parser):
                raise UserError(f"there is no option {option!r}: {foreign.advice}; see `{parser.prog} --help`")
            if foreign.now in current_options or (foreign.now == PACKAGE_WORD and _takes_package(parser)):
                return foreign.now, False
    return None, False


def _words(parser: argparse.ArgumentParser) -> list[str]:
    return [action.dest for action in parser._actions if not action.option_strings]


def _takes_package(parser: argparse.ArgumentParser) -> bool:
    return PACKAGE_WORD in _words(parser)


def _takes_package_first(parser: argparse.ArgumentParser) -> bool:
    return _words(parser)[:1] == [PACKAGE_WORD]


def _line(before: Sequence[str], now: Sequence[str], values: Sequence[str], is_former: bool) -> str:
    spelling = f"`{shlex.join(before)}` is written `{shlex.join([*now, *values])}`"
    return f"{spelling} now; the former spelling will go" if is_former else f"{spelling} here"
