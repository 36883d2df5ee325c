"""The verbs of the command line and their parsers. Only the module of the verb that runs is imported."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterable, Sequence
from typing import Any

from neuronpipe.launch.arguments.parser import Parser, cut, find_nearest
from neuronpipe.launch.arguments.settings import Settings, settings_file
from neuronpipe.launch.arguments.spellings import FOREIGN_VERBS, FORMER_VERBS
from neuronpipe.protocol.errors import UserError

DESCRIPTION = "Run language models that are larger than the memory they may use."

GROUPS: dict[str, dict[str, str]] = {
    "runs": {
        "run": "generate text from a prompt, in a run started for it",
        "chat": "talk to a model in this terminal",
        "serve": "serve models over HTTP: OpenAI's API, and a page to chat",
        "up": "start a run that stays",
        "ask": "generate text with a live run",
        "ps": "list your live runs: model, memory, requests, addresses",
        "status": "show the processes, memory and counters of a live run",
        "watch": "follow live runs in this terminal or as JSON, or share the view",
        "down": "stop a live run",
        "throttle": "slow a run down while the device is too hot",
        "swap": "replace a process of a live run, also by another implementation",
    },
    "packages": {
        "models": "show which models this machine can run, and how fast",
        "pull": "download a model and convert it to a package",
        "list": "list the packages that have names",
        "rm": "remove packages by name",
        "convert": "convert a Hugging Face directory or a GGUF file to a package",
        "inspect": "show the contents of a package",
        "profile": "measure which neurons fire, and fit a predictor of them",
        "compile": "compile a package's prompt graphs for a neural processor",
        "synth": "make a synthetic package with the shape and statistics of a real model",
    },
    "measurements": {
        "plan": "show or write the plan for a package on this or another device",
        "simulate": "simulate the speed of a model on another device",
        "perplexity": "measure how well a package predicts a text",
        "bench": "measure the speed of a package, and where its time goes",
        "report": "measure a package briefly, and write a report to share",
        "trace": "record the steps of a live run, for Perfetto or as a picture",
        "conformance": "test an implementation of a role, also with faulty peers",
        "doctor": "check this machine, and give advice",
    },
    "command": {
        "help": "show the verbs, or the options of a verb",
        "completion": "print the completion script for bash, zsh or fish",
        "man": "print the manual page",
    },
}
"""The verbs with their purposes, by the folder of their modules."""

HEADINGS = {
    "runs": "generate text, manage runs",
    "packages": "packages",
    "measurements": "plan and measure",
    "command": "about this command",
}

VERBS = {verb: purpose for verbs in GROUPS.values() for verb, purpose in verbs.items()}
FOLDERS = {verb: folder for folder, verbs in GROUPS.items() for verb in verbs}

ALIASES = {"stop": "down", "ls": "list", "show": "inspect"}
"""Further names of verbs, which the help shows."""

TWO_WORD_VERBS = {
    "profile device": "measure this device for the planner: kernels, memory, flash",
    "profile diff": "show what changed from one device profile to another",
}
"""Verbs whose first word is a verb itself. To `profile` a package that is called device, write ./device."""


class _Version(argparse.Action):
    """Print the version. It is looked up only then, because that takes 30 ms."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"neuronpipe {version('neuronpipe')}")
        parser.exit()


class _MainParser(Parser):
    """The parser of the whole command line; its help lists the verbs by groups."""

    def format_full_help(self) -> str:
        lines = ["usage: neuronpipe VERB [options]", "", DESCRIPTION]
        names = {name: name for name in VERBS} | {name: f"{name} ({alias})" for alias, name in ALIASES.items()}
        width = max(map(len, names.values()))
        for folder, verbs in GROUPS.items():
            lines += ["", f"{HEADINGS[folder]}:"]
            lines += [f"  {names[verb]:<{width}}  {purpose}" for verb, purpose in verbs.items()]
        lines += ["", "options:", f"  {'-h, --help':<{width}}  show this page and exit"]
        lines += [f"  {'--version':<{width}}  show the version and exit", ""]
        lines += ["`neuronpipe VERB --help` shows the options of a verb."]
        return "\n".join(lines) + "\n"


def join_words(words: list[str]) -> list[str]:
    """Return the words with aliases replaced, and a verb of two words as one word."""
    words = [ALIASES.get(word, FORMER_VERBS.get(word, word)) for word in words[:1]] + words[1:]
    return [" ".join(words[:2]), *words[2:]] if " ".join(words[:2]) in TWO_WORD_VERBS else words


def find_verb(words: Iterable[str]) -> str | None:
    """Return the first verb among joined words."""
    return next((word for word in words if word in VERBS or word in TWO_WORD_VERBS), None)


def check_first_word(words: list[str], parser: Parser) -> None:
    """Raise UserError if the first of the joined words is neither a verb nor an option of the command itself."""
    first = words[0]
    if first in VERBS or first in TWO_WORD_VERBS or first in parser.options:
        return
    if not first.startswith("-"):
        nearest = FOREIGN_VERBS.get(first) or find_nearest(cut(first), (*VERBS, *ALIASES))
        suggestion = f"did you mean `{nearest}`?" if nearest else f"the verbs are {', '.join(VERBS)}."
        raise UserError(f"{cut(first)!r} is not a verb; {suggestion} See `neuronpipe --help`")
    if (verb := find_verb(words)) is not None:
        raise UserError(f"{cut(first)!r}: options come after the verb, as in `neuronpipe {verb} -h`")
    parser.refuse(first)


def parsers(verb: str | None) -> tuple[Parser, dict[str, Parser]]:
    """Return the main parser, and the parser of each verb. Only the parser of `verb` has its arguments."""
    parser = _MainParser(prog="neuronpipe", description=DESCRIPTION)
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version and exit")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=Parser)
    by_verb: dict[str, Parser] = {}
    for name, purpose in VERBS.items():
        aliases = [alias for alias, aliased in ALIASES.items() if aliased == name]
        by_verb[name] = subparsers.add_parser(
            name, aliases=aliases, help=purpose, description=_sentence(purpose), add_help=name == verb
        )
    if verb in TWO_WORD_VERBS:
        by_verb[verb] = subparsers.add_parser(verb, description=_sentence(TWO_WORD_VERBS[verb]))
    if verb is not None:
        module = verb_module(verb)
        module.add_arguments(by_verb[verb])
        if common := getattr(module, "COMMON_OPTIONS", ()):
            by_verb[verb].make_short_help(common)
    return parser, by_verb


def _sentence(purpose: str) -> str:
    return f"{purpose[0].upper()}{purpose[1:]}."


def verb_parser(verb: str) -> Parser:
    return parsers(verb)[1][verb]


def verb_module(verb: str) -> Any:
    folder = FOLDERS.get(verb) or FOLDERS[verb.split()[0]]
    return importlib.import_module(f"neuronpipe.launch.verbs.{folder}.{verb.replace(' ', '_')}")


def help_page(words: Sequence[str], *, show_all: bool = False) -> str:
    """Return the help of a verb, or without words that of the whole command. Raises UserError for an unknown verb."""
    parser, _ = parsers(None)
    if not words:
        return parser.format_help()
    verb, *more = join_words(list(words))
    check_first_word([verb], parser)
    of_verb = verb_parser(verb)
    if more:
        of_verb.refuse(more[0])
    of_verb.note = read_settings().note(verb)
    return of_verb.format_full_help() if show_all else of_verb.format_help()


def read_settings() -> Settings:
    """Read the settings file. Raises UserError if it is not valid."""
    return Settings(settings_file(), (*VERBS, *TWO_WORD_VERBS), find_nearest)
