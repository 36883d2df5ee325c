"""The command line: `neuronpipe VERB ...`. One file per verb in verbs/; only the verb that runs is imported.

Exit codes: 0 done, 1 failed, 2 wrong usage or input, 3 no such run, 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
from typing import NoReturn

from neuronpipe.launch.typed import as_typed
from neuronpipe.protocol.errors import UserError

VERBS = {
    "run": "generate text from a prompt, with a pipeline started for it",
    "serve": "talk to a model over HTTP: OpenAI's API, and a page",
    "up": "start a run that stays",
    "ask": "generate text with a run that is up",
    "status": "show a live run's processes, memory and counters",
    "watch": "see what live runs do, in this terminal or as JSON, or let others see it",
    "down": "stop a run",
    "cool": "watch the device's temperature, and let a run rest while it is too hot",
    "swap": "have another process, or another implementation, take a seat of a live run",
    "conformance": "try whether an implementation does what its role must, with peers that behave badly",
    "convert": "make a package from a Hugging Face directory or a GGUF file",
    "inspect": "show what a package holds and how it lies on flash",
    "profile": "count which neurons fire on a text, and give a package a predictor of them",
    "synth": "make a synthetic package with a real model's shape and activation statistics",
    "plan": "show or write the plan for a package on this device",
    "perplexity": "measure how well a package predicts a text",
    "bench": "measure how fast a package runs here, and where the time goes",
    "trace": "write down what a live run's processes do when, for Perfetto or as a picture",
    "doctor": "check this machine and say what to do about it",
}


NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class _Version(argparse.Action):
    """Looks the version up only when it is asked for: that costs 30 ms."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"neuronpipe {version('neuronpipe')}")
        parser.exit()


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the words in one line, like everything else that a person gets wrong."""

    def error(self, message: str) -> NoReturn:
        """Raises UserError."""
        raise UserError(f"{message}; see `{self.prog} --help`")


def _check_verb(words: list[str]) -> None:
    """Raises UserError when the first word is meant as a verb and is none."""
    if words and not words[0].startswith("-") and words[0] not in VERBS:
        import difflib  # only a mistake pays for it

        close = difflib.get_close_matches(words[0], VERBS, n=1)
        meant = f"did you mean `{close[0]}`?" if close else f"the verbs are {', '.join(VERBS)}."
        raise UserError(f"{words[0]!r} is no verb; {meant} See `neuronpipe --help`")


def _parser(verb: str | None) -> argparse.ArgumentParser:
    parser = _Parser(
        prog="neuronpipe", description="Runs language models that are larger than the memory they may use."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="show the version")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, purpose in VERBS.items():
        verb_parser = verbs.add_parser(
            name, help=purpose, description=purpose[0].upper() + purpose[1:] + ".", add_help=name == verb
        )
        if name == verb:
            importlib.import_module(f"neuronpipe.launch.verbs.{name}").add_arguments(verb_parser)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Run one verb; returns the exit code. A person's mistake is one line on stderr, never a traceback."""
    words = sys.argv[1:] if arguments is None else arguments
    verb = next((word for word in words if word in VERBS), None)
    try:
        if not words:
            _parser(None).print_help(sys.stderr)
            return UserError.exit_code
        _check_verb(words)
        asked = _parser(verb).parse_args(words)
        code = importlib.import_module(f"neuronpipe.launch.verbs.{asked.verb}").main(asked)
        sys.stdout.flush()
        return int(code)
    except UserError as error:
        print(f"neuronpipe: {as_typed(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("neuronpipe: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        _silence()  # nobody reads: not an error worth a word
        return 141
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        _silence()
        print(f"neuronpipe: {error.filename or 'the output'}: cannot be written: {error.strerror}", file=sys.stderr)
        return UserError.exit_code


def _silence() -> None:
    """What is still on its way to stdout would be tried again at the end, and complained of."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
