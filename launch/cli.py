"""The command line: `neuronpipe VERB ...`. One file per verb in verbs/; only the verb that runs is imported.

Exit codes: 0 done, 1 failed, 2 wrong usage or input, 3 no such run, 130 interrupted, 143 and 129 told to end by SIGTERM
and SIGHUP. The verbs of `ENDED_AS_TOLD` live with a run: told to end they end it in order, which is what was wanted: 0.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from neuronpipe.launch.arguments.settings import Settings, settings_file, settled
from neuronpipe.launch.arguments.spellings import FOREIGN_VERBS, FORMER_VERBS, in_present_words, take_former_word
from neuronpipe.launch.formats import as_typed
from neuronpipe.launch.progress import begin_command
from neuronpipe.protocol.errors import UserError

VERBS = {
    "run": "generate text from a prompt, with a pipeline started for it",
    "chat": "talk to a model in this terminal, with a run that is live or one of its own",
    "serve": "talk to a model over HTTP: OpenAI's API, and a page",
    "up": "start a run that stays",
    "ask": "generate text with a run that is up",
    "ps": "show your live runs: model, memory, texts under way, addresses",
    "status": "show a live run's processes, memory and counters",
    "watch": "see what live runs do, in this terminal or as JSON, or let others see it",
    "down": "stop a run",
    "throttle": "watch the device's temperature, and slow a run down while it is too hot",
    "swap": "replace a process of a live run, also by another implementation; the output does not change",
    "conformance": "test whether an implementation does what its role must, also with faulty peers",
    "pull": "download a model from a hub and make a package of it, which is then called by its name",
    "list": "show the packages that are called by their names",
    "rm": "remove packages by their names",
    "convert": "make a package from a Hugging Face directory or a GGUF file",
    "inspect": "show what a package holds and how it lies on flash",
    "profile": "count which neurons fire on a text, and give a package a predictor of them",
    "compile": "make what a neural processor computes a package's prompts with, for a chip",
    "synth": "make a synthetic package with a real model's shape and activation statistics",
    "plan": "show or write the plan for a package on this device, or for a phone that is not here",
    "simulate": "say how fast a model would be on a phone or another device, without having it",
    "perplexity": "measure how well a package predicts a text",
    "bench": "measure how fast a package runs here, and where the time goes",
    "trace": "record what a live run's processes do when, for Perfetto or as a picture",
    "doctor": "check this machine and say what to do about it",
    "help": "show what there is, or what a verb takes",
    "completion": "print what bash, zsh or fish completes neuronpipe with",
    "man": "print the manual page",
}

ALIASES = {"stop": "down", "ls": "list", "show": "inspect"}
"""Other names of verbs; help shows them."""

OF_TWO_WORDS = {
    "profile device": "measure this device for the planner: kernels, memory, flash, what a read costs",
    "profile diff": "say what changed from one device profile to another",
}
"""Verbs of their own that read as words of another one; a package of such a name is written ./device."""

ENDED_AS_TOLD = ("run", "chat", "serve", "up", "watch", "bench")
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
TOO_MANY_FILES = (errno.EMFILE, errno.ENFILE)
MAX_QUOTED_CHARACTERS = 80
_LONG_QUOTE = re.compile(rf"""(?s)(['"])((?:(?!\1).){{{MAX_QUOTED_CHARACTERS}}})(?:(?!\1).)+\1""")

NUMBERS = {"int": "whole number", "float": "number"}
_INVALID = re.compile(r"invalid (int|float) value: (.*)", re.DOTALL)


class _Told(KeyboardInterrupt):
    """SIGTERM or SIGHUP: whatever Ctrl-C lets a command put in order, they do as well."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = signal.Signals(number)


class _Version(argparse.Action):
    """Looks the version up only when it is asked for: that costs 30 ms."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"neuronpipe {version('neuronpipe')}")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the words in one line, like everything else that a person gets wrong."""

    note = ""  # what help ends with

    def format_help(self) -> str:
        """Whole lines at the end stay whole: they hold what can be pasted."""
        return super().format_help() + self.note

    @property
    def options(self) -> Iterable[str]:
        """Every option there is, as it is typed."""
        return self._option_string_actions.keys()

    def error(self, message: str) -> NoReturn:
        """Raises UserError."""
        if message.startswith("the following arguments are required"):
            message = self._missing(message)
        message = _INVALID.sub(lambda match: f"{match[2]} is no {NUMBERS[match[1]]}", message)
        message = _LONG_QUOTE.sub(r"\1\2...\1", message)
        raise UserError(f"{message}{' See' if message.endswith('?') else '; see'} `{self.prog} --help`")

    def _missing(self, message: str) -> str:
        """The same, and what each of the words or options is that are missing."""
        names = message.partition(": ")[2].split(", ")
        meanings = {
            name: f"one of {', '.join(map(str, action.choices))}" if action.choices else help_of(action)
            for action in self._actions
            if (name := "/".join(action.option_strings) or str(action.metavar or action.dest)) in names
        }
        if len(names) > 1:
            meanings = {name: f"{name}: {meaning}" for name, meaning in meanings.items()}
        return f"{message} ({'; '.join(meanings.values())})" if all(meanings.values()) else message

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """argparse takes the two dashes of `--option=--` for the end of options, and gives the option an empty list."""
        if action.option_strings and arg_strings == ["--"] and action.nargs is None:
            raise argparse.ArgumentError(action, "expected one argument, and -- is none")
        return super()._get_values(action, arg_strings)

    def _match_arguments_partial(self, actions: Sequence[argparse.Action], arg_strings_pattern: str) -> list[int]:
        """A word that may be left out may also stand behind options: until those are read, argparse must not take it
        for left out, as it does before Python 3.13 where another word stands in front."""
        counts = super()._match_arguments_partial(actions, arg_strings_pattern)
        while "O" in arg_strings_pattern and counts and counts[-1] == 0:
            counts.pop()
        return counts

    def refuse(self, unknown: str) -> NoReturn:
        """A word that is none of this parser's options, or one more than it takes. Raises UserError."""
        name = _cut(unknown.partition("=")[0])
        if not name.startswith("-"):
            raise UserError(f"{_cut(unknown)!r} is one word more than this takes; see `{self.prog} --help`")
        near = _nearest(name, self.options)
        meant = f"; did you mean `{near}`? See" if near else "; see"
        raise UserError(f"there is no option {name!r}{meant} `{self.prog} --help`")


def _cut(word: str) -> str:
    return word if len(word) <= MAX_QUOTED_CHARACTERS else word[:MAX_QUOTED_CHARACTERS] + "..."


def _nearest(word: str, known: Iterable[str]) -> str | None:
    """What was probably meant: what begins so, or else what is most like it, above all at its beginning."""
    import difflib  # only a mistake pays for it

    plain = {one.strip("-"): one for one in known}
    word = word.strip("-").lower()
    if begin_so := [one for one in plain if len(word) > 1 and one.startswith(word)]:
        return plain[min(begin_so, key=len)]
    begin_alike = [one for one in plain if one.startswith(word[:3])]  # a shortened word is like many that are not meant
    close = difflib.get_close_matches(word, begin_alike, n=1, cutoff=0.4) or difflib.get_close_matches(word, plain, n=1)
    return plain[close[0]] if close else None


def _joined(words: list[str]) -> list[str]:
    """The words, with a verb of two words as one, and under its own name."""
    words = [ALIASES.get(word, FORMER_VERBS.get(word, word)) for word in words[:1]] + words[1:]
    return [" ".join(words[:2]), *words[2:]] if " ".join(words[:2]) in OF_TWO_WORDS else words


def _verb_in(words: Iterable[str]) -> str | None:
    return next((word for word in words if word in VERBS or word in OF_TWO_WORDS), None)


def _check_first(words: list[str], parser: _Parser) -> None:
    """Raises UserError when the first word is no verb, or an option of a verb that comes later."""
    first = words[0]
    if first in VERBS or first in OF_TWO_WORDS or first in parser.options:
        return
    if not first.startswith("-"):
        near = FOREIGN_VERBS.get(first) or _nearest(_cut(first), (*VERBS, *ALIASES))
        meant = f"did you mean `{near}`?" if near else f"the verbs are {', '.join(VERBS)}."
        raise UserError(f"{_cut(first)!r} is no verb; {meant} See `neuronpipe --help`")
    if (verb := _verb_in(words)) is not None:
        raise UserError(f"{_cut(first)!r}: options come after the verb, as in `neuronpipe {verb} -h`")
    parser.refuse(first)


def parsers(verb: str | None) -> tuple[_Parser, dict[str, _Parser]]:
    """The parser, and that of each verb; only the one of `verb` knows its arguments."""
    parser = _Parser(
        prog="neuronpipe", description="Runs language models that are larger than the memory they may use."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    by_name = {}
    for name, purpose in VERBS.items():
        by_name[name] = verbs.add_parser(
            name,
            aliases=[alias for alias, meant in ALIASES.items() if meant == name],
            help=purpose,
            description=purpose[0].upper() + purpose[1:] + ".",
            add_help=name == verb,
        )
    if verb in OF_TWO_WORDS:
        purpose = OF_TWO_WORDS[verb]
        by_name[verb] = verbs.add_parser(verb, description=purpose[0].upper() + purpose[1:] + ".")
    if verb is not None:
        _module(verb).add_arguments(by_name[verb])
    return parser, by_name


def verb_parser(verb: str) -> _Parser:
    """The parser of one verb, with all its arguments."""
    return parsers(verb)[1][verb]


def help_page(words: Sequence[str]) -> str:
    """What `--help` shows of a verb, or of the whole program where there are no words. Raises UserError where the words
    are no verb."""
    parser, _ = parsers(None)
    if not words:
        return parser.format_help()
    verb, *more = _joined(list(words))
    _check_first([verb], parser)
    of_verb = verb_parser(verb)
    if more:
        of_verb.refuse(more[0])
    of_verb.note = settings().note(verb)
    return of_verb.format_help()


def help_of(action: argparse.Action) -> str:
    """What the help says of an argument, on one line."""
    if action.help in (None, argparse.SUPPRESS):
        return ""
    return " ".join(str(action.help % {**vars(action), "prog": "neuronpipe"}).split())


def settings() -> Settings:
    """What the settings file says. Raises UserError."""
    return Settings(settings_file(), (*VERBS, *OF_TWO_WORDS), _nearest)


def _module(verb: str) -> Any:
    return importlib.import_module(f"neuronpipe.launch.verbs.{verb.replace(' ', '_')}")


def _parsed(words: list[str]) -> argparse.Namespace:
    """The verb and its arguments; stderr names the present spelling of what was written otherwise. Raises UserError for
    words that mean nothing."""
    former = [word for word in words[:1] if word in FORMER_VERBS]
    lines = [f"`{word}` is written `{FORMER_VERBS[word]}` now; the former spelling will go" for word in former]
    words = _joined(words)
    verb = _verb_in(words)
    parser, by_name = parsers(verb)
    _check_first(words, parser)
    if verb is not None:
        made = settings()
        made.apply(verb, by_name[verb])
        by_name[verb].note = made.note(verb)
        if verb == words[0]:
            words, written_otherwise = in_present_words(words, by_name[verb])
            lines += written_otherwise
    asked, unknown = parser.parse_known_args(words)
    if unknown:
        line = take_former_word(asked.verb, unknown, asked, by_name[asked.verb])
        if line is None:
            by_name[asked.verb].refuse(next((word for word in unknown if word.startswith("-")), unknown[0]))
        lines.append(line)
    for line in lines:
        print(f"neuronpipe: {line}", file=sys.stderr)
    return settled(asked)


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns the exit code. A person's mistake is one line on stderr, never a traceback."""
    words = sys.argv[1:] if arguments is None else arguments
    if arguments is None:
        begin_command()
    try:
        with _signals_told():
            return _run(words)
    except _Told as told:
        print(f"neuronpipe: ended by {told.number.name}", file=sys.stderr)
        return 0 if _verb_in(words) in ENDED_AS_TOLD else 128 + told.number
    except UserError as error:
        print(f"neuronpipe: {as_typed(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("neuronpipe: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _silence()  # the reader has closed the pipe: not an error to report
        return 141
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            print(f"neuronpipe: {_cut(str(error.filename))!r}: {error.strerror}", file=sys.stderr)
            return UserError.exit_code
        if error.errno in TOO_MANY_FILES:
            print(f"neuronpipe: {error.strerror}; raise the limit with `ulimit -n 1024`", file=sys.stderr)
            return UserError.exit_code
        if error.errno not in NO_ROOM:
            raise
        _silence()
        print(f"neuronpipe: {error.filename or 'the output'}: cannot be written: {error.strerror}", file=sys.stderr)
        return UserError.exit_code


def _run(words: list[str]) -> int:
    _prepare_streams()
    if not words:
        parsers(None)[0].print_help(sys.stderr)
        return UserError.exit_code
    asked = _parsed(words)
    code = _module(asked.verb).main(asked)
    sys.stdout.flush()
    return int(code)


def _prepare_streams() -> None:
    """Descriptors 0 to 2 are open, or a socket would take their place; what stdout cannot encode is shown as an escape.
    Raises UserError where stdout is closed (`>&-`): there is no way to answer."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest that is free: this one
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - as long as the process
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115
    if sys.stdout is None:
        raise UserError("standard output is closed: let it go to a file, or to /dev/null")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def _signals_told() -> Iterator[None]:
    """SIGTERM and SIGHUP are raised as `_Told`, as the first process of a container as well, where they would do
    nothing. One that is ignored stays so: that is what `nohup` is for."""

    def tell(number: int, _: object) -> NoReturn:
        raise _Told(number)

    told = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in told:
        signal.signal(number, tell)
    try:
        yield
    finally:
        for number in told:
            signal.signal(number, signal.SIG_DFL)


def _silence() -> None:
    """What is still on its way to stdout would be tried again at the end, and complained of."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
