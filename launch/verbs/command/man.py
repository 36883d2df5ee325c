"""`neuronpipe man`: print the manual page, in roff, made from the parsers; `neuronpipe man | man -l -` shows it."""

from __future__ import annotations

import argparse
import re
from importlib.metadata import version

from neuronpipe.launch.arguments.parser import help_text
from neuronpipe.launch.arguments.settings import VARIABLE as CONFIG
from neuronpipe.launch.arguments.verbs import ALIASES, TWO_WORD_VERBS, VERBS, verb_parser
from neuronpipe.plans.pull.package_library import VARIABLE as DATA

EXIT_CODES = {
    "0": "done",
    "1": "failed",
    "2": "wrong usage or input; one line on standard error says what",
    "3": "no such run",
    "130": "interrupted; 143 and 129: ended by SIGTERM and SIGHUP",
    "141": "the reader of standard output is gone",
}
FILES = {
    "~/.config/neuronpipe/config.toml": f"defaults of options; {CONFIG} names another file",
    "~/.local/share/neuronpipe": f"packages that have names; {DATA} names another folder",
}

ESCAPES = str.maketrans({"\\": "\\e", "-": "\\-", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Show it with `neuronpipe man | man -l -`, or save it as ~/.local/share/man/man1/neuronpipe.1."


def main(arguments: argparse.Namespace) -> int:
    print(page(), end="")
    return 0


def page() -> str:
    lines = [
        f'.TH NEURONPIPE 1 "" "neuronpipe {_text(version("neuronpipe"))}" "User Commands"',
        ".nh",
        ".ad l",
        ".SH NAME",
        "neuronpipe \\- run language models that are larger than the memory they may use",
        ".SH SYNOPSIS",
        ".B neuronpipe",
        ".I VERB",
        "[...]",
        ".SH VERBS",
    ]
    for verb, purpose in (VERBS | TWO_WORD_VERBS).items():
        lines += _verb(verb, purpose)
    lines.append(".SH EXIT STATUS")
    for code, meaning in EXIT_CODES.items():
        lines += [".TP", f".B {code}", _text(meaning)]
    lines.append(".SH FILES")
    for file, meaning in FILES.items():
        lines += [".TP", f".I {_text(file)}", _text(meaning)]
    return "\n".join(lines) + "\n"


def _verb(verb: str, purpose: str) -> list[str]:
    parser = verb_parser(verb)
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    aliases = "".join(f"; also called {alias}" for alias, aliased in ALIASES.items() if aliased == verb)
    lines = [f'.SS "neuronpipe {verb}"', f"{_text(purpose[0].upper() + purpose[1:])}{aliases}.", ".PP", _text(usage)]
    for action in parser._actions:
        if action.dest == "help":
            continue
        metavar = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest)
        value = "" if action.nargs == 0 else f" \\fI{_text(str(metavar))}\\fR"
        names = ", ".join(f"\\fB{_text(name)}\\fR" for name in action.option_strings)
        lines += [".TP", f"{names}{value}".strip(), _text(help_text(action))]
    return lines


def _text(text: str) -> str:
    """Escape text for roff: hyphens stay as typed, and no line begins with a request."""
    text = re.sub(r"\s+", " ", text).strip()
    text = text.translate(ESCAPES)
    return f"\\&{text}" if text.startswith((".", "'")) else text
