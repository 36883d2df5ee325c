"""The parser of a verb: errors on one line, a short help page, and words that may stand behind options."""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterable, Sequence
from typing import Any, NoReturn

from neuronpipe.protocol.errors import UserError

MAX_QUOTED_CHARACTERS = 80
HELP_ALL = "help_all"
NUMBERS = {"int": "whole number", "float": "number"}
_INVALID = re.compile(r"invalid (int|float) value: (.*)", re.DOTALL)
_LONG_QUOTE = re.compile(rf"""(?s)(['"])((?:(?!\1).){{{MAX_QUOTED_CHARACTERS}}})(?:(?!\1).)+\1""")


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` whose errors are raised as UserError, like every other mistake of a user.

    common: destinations of the arguments that --help shows; --help-all shows all. Empty: --help shows all.
    note: text at the end of the help page; its lines are not wrapped, because they can be pasted
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.common: Collection[str] = ()
        self.note = ""

    def make_short_help(self, common: Collection[str]) -> None:
        """Limit --help to the arguments with these destinations, and add --help-all, which shows all."""
        self.common = common
        self.add_argument("--help-all", action=_HelpAll, nargs=0, dest=HELP_ALL, help="show all options and exit")

    def format_help(self) -> str:
        """Return the help page: the short one if there is one."""
        if not self.common:
            return self.format_full_help()
        hidden = [action for action in self._actions if action.dest not in {*self.common, "help", HELP_ALL}]
        texts = [action.help for action in hidden]
        try:
            for action in hidden:
                action.help = argparse.SUPPRESS
            return self.format_full_help()
        finally:
            for action, text in zip(hidden, texts, strict=True):
                action.help = text

    def format_full_help(self) -> str:
        self.usage = self.short_usage()
        return super().format_help() + self.note

    def format_usage(self) -> str:
        """Return the line of `short_usage`, with its prefix."""
        self.usage = self.short_usage()
        return super().format_usage()

    def short_usage(self) -> str:
        """Return the verb, its required options, `[options]` and the words that it takes."""
        shapes = {"?": "[{}]", "*": "[{} ...]", "+": "{} [{} ...]"}
        words = [
            shapes.get(str(action.nargs), "{}").format(*2 * [_metavar(action)])
            for action in self._actions
            if not action.option_strings and action.help is not argparse.SUPPRESS
        ]
        required = [
            f"{action.option_strings[-1]} {_metavar(action)}"
            for action in self._actions
            if action.option_strings and action.required
        ]
        return " ".join([self.prog, *required, "[options]", *words])

    @property
    def options(self) -> Iterable[str]:
        return self._option_string_actions.keys()

    def error(self, message: str) -> NoReturn:
        """Raise UserError with an improved message."""
        if message.startswith("the following arguments are required"):
            message = self._explain_missing(message)
        message = _INVALID.sub(lambda match: f"{match[2]} is not a {NUMBERS[match[1]]}", message)
        message = _LONG_QUOTE.sub(r"\1\2...\1", message)
        raise UserError(f"{message}{' See' if message.endswith('?') else '; see'} `{self.prog} --help`")

    def _explain_missing(self, message: str) -> str:
        """Add the meanings of the missing words or options to argparse's message."""
        names = message.partition(": ")[2].split(", ")
        meanings = {
            name: f"one of {', '.join(map(str, action.choices))}" if action.choices else help_text(action)
            for action in self._actions
            if (name := "/".join(action.option_strings) or _metavar(action)) in names
        }
        if len(names) > 1:
            meanings = {name: f"{name}: {meaning}" for name, meaning in meanings.items()}
        return f"{message} ({'; '.join(meanings.values())})" if all(meanings.values()) else message

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse takes the two dashes of `--option=--` for the end of options, and gives the option an empty list.
        if action.option_strings and arg_strings == ["--"] and action.nargs is None:
            raise argparse.ArgumentError(action, "expected one argument, and -- is none")
        return super()._get_values(action, arg_strings)

    def _match_arguments_partial(self, actions: Sequence[argparse.Action], arg_strings_pattern: str) -> list[int]:
        # An optional word may also stand behind options. Before Python 3.13, argparse takes it for absent if another
        # word stands in front; so it must not be consumed as absent while options are left.
        counts = super()._match_arguments_partial(actions, arg_strings_pattern)
        while "O" in arg_strings_pattern and counts and counts[-1] == 0:
            counts.pop()
        return counts

    def refuse(self, unknown: str) -> NoReturn:
        """Raise UserError for an unknown option, or for one word too many."""
        name = cut(unknown.partition("=")[0])
        if not name.startswith("-"):
            raise UserError(f"{cut(unknown)!r} is one word more than this takes; see `{self.prog} --help`")
        nearest = find_nearest(name, self.options)
        suggestion = f"; did you mean `{nearest}`? See" if nearest else "; see"
        raise UserError(f"there is no option {name!r}{suggestion} `{self.prog} --help`")


class _HelpAll(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, Parser)
        print(parser.format_full_help(), end="")
        parser.exit()


def _metavar(action: argparse.Action) -> str:
    return str(action.metavar or action.dest)


def help_text(action: argparse.Action) -> str:
    """Return the help of an argument on one line; empty if it has none."""
    if action.help in (None, argparse.SUPPRESS):
        return ""
    return " ".join(str(action.help % {**vars(action), "prog": "neuronpipe"}).split())


def cut(word: str) -> str:
    """Shorten a word of the user for an error message."""
    return word if len(word) <= MAX_QUOTED_CHARACTERS else word[:MAX_QUOTED_CHARACTERS] + "..."


def find_nearest(word: str, names: Iterable[str]) -> str | None:
    """Return the shortest name that begins with the word, or else the most similar name; None if none is similar."""
    import difflib  # imported here: only a mistake pays for it

    by_plain_name = {name.strip("-"): name for name in names}
    word = word.strip("-").lower()
    if completions := [plain for plain in by_plain_name if len(word) > 1 and plain.startswith(word)]:
        return by_plain_name[min(completions, key=len)]
    # Names with the same beginning first: an abbreviation is similar to many others.
    same_beginning = [plain for plain in by_plain_name if plain.startswith(word[:3])]
    matches = difflib.get_close_matches(word, same_beginning, n=1, cutoff=0.4)
    matches = matches or difflib.get_close_matches(word, by_plain_name, n=1)
    return by_plain_name[matches[0]] if matches else None
