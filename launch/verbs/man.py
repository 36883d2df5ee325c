"""`neuronpipe man`: the manual page, in roff, from the parsers; `neuronpipe man | man -l -` shows it."""

from __future__ import annotations

import argparse
import re
from importlib.metadata import version

from neuronpipe.launch import cli
from neuronpipe.launch.arguments.settings import VARIABLE as CONFIG
from neuronpipe.plans.pull.package_library import VARIABLE as DATA

EXIT_CODES = {
    "0": "done",
    "1": "failed",
    "2": "wrong usage or input; one line on standard error says what",
    "3": "no such run",
    "130": "interrupted; 143 and 129: ended by SIGTERM and SIGHUP",
}
FILES = {
    "~/.config/neuronpipe/config.toml": f"options that are not typed every time; {CONFIG} names another file",
    "~/.local/share/neuronpipe": f"the packages that have names; {DATA} names another folder",
}

ESCAPES = str.maketrans({"\\": "\\e", "-": "\\-", "`": "\\(ga", "^": "\\(ha", "~": "\\(ti"})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Show it with `neuronpipe man | man -l -`; keep it in ~/.local/share/man/man1/neuronpipe.1."


def main(arguments: argparse.Namespace) -> int:
    print(page(), end="")
    return 0


def page() -> str:
    """The whole page."""
    lines = [
        f'.TH NEURONPIPE 1 "" "neuronpipe {_text(version("neuronpipe"))}" "User Commands"',
        ".nh",
        ".ad l",
        ".SH NAME",
        "neuronpipe \\- runs language models that are larger than the memory they may use",
        ".SH SYNOPSIS",
        ".B neuronpipe",
        ".I VERB",
        "[...]",
        ".SH VERBS",
    ]
    for verb, meaning in (cli.VERBS | cli.OF_TWO_WORDS).items():
        lines += _verb(verb, meaning)
    lines.append(".SH EXIT STATUS")
    for code, meaning in EXIT_CODES.items():
        lines += [".TP", f".B {code}", _text(meaning)]
    lines.append(".SH FILES")
    for file, meaning in FILES.items():
        lines += [".TP", f".I {_text(file)}", _text(meaning)]
    return "\n".join(lines) + "\n"


def _verb(verb: str, meaning: str) -> list[str]:
    parser = cli.verb_parser(verb)
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    also = "".join(f"; also called {alias}" for alias, meant in cli.ALIASES.items() if meant == verb)
    lines = [f'.SS "neuronpipe {verb}"', f"{_text(meaning[0].upper() + meaning[1:])}{also}.", ".PP", _text(usage)]
    for action in parser._actions:
        if action.dest == "help":
            continue
        shown = action.metavar or ("{" + ",".join(map(str, action.choices)) + "}" if action.choices else action.dest)
        value = "" if action.nargs == 0 else f" \\fI{_text(str(shown))}\\fR"
        names = ", ".join(f"\\fB{_text(name)}\\fR" for name in action.option_strings)
        lines += [".TP", f"{names}{value}".strip(), _text(cli.help_of(action))]
    return lines


def _text(text: str) -> str:
    """A text that roff shows as it is: hyphens as typed, no line that begins with a request."""
    text = re.sub(r"\s+", " ", text).strip()
    text = (
        text.replace("\\", "\\e").replace("-", "\\-").replace("`", "\\(ga").replace("^", "\\(ha").replace("~", "\\(ti")
    )
    return f"\\&{text}" if text.startswith((".", "'")) else text
