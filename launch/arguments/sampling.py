"""The arguments of `run` and `ask` that say how tokens are sampled. `Generate` declares most of them: their names,
defaults, ranges and help."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from neuronpipe.launch.formats import parse_text
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.request import MAX_BIAS, RANGES, SAMPLING_OPTIONS, Bias
from neuronpipe.protocol.options import Option, Range

DEFAULTS = {"temperature": 0.8, "top_p": 0.95}  # where `Generate` has others
SEEDS = Range(0, (1 << 63) - 1)
MAX_SCHEMA_CHARACTERS = 1 << 20


def add_sampling_arguments(parser: argparse.ArgumentParser, *, logprobs: bool = True) -> None:
    """Temperature, cuts, penalties, biases, the form of the answer. logprobs: whether there is a place to show them."""
    for option in SAMPLING_OPTIONS:
        _add(parser, option)
    add = parser.add_argument
    add(
        "--logit-bias",
        action="append",
        default=[],
        metavar="TOKEN=BIAS",
        help="add BIAS to the logit of a token id; -100 bans it; may be given again",
    )
    add(
        "--json-schema",
        type=parse_text,
        metavar="FILE|TEXT",
        help="the answer is JSON of this schema; 'json' for any object",
    )
    if logprobs:
        help_text = "with --json: log probabilities, and the N likeliest of each place"
        add("--logprobs", type=int, metavar="N", help=help_text)
    else:
        parser.set_defaults(logprobs=None, json=False)
    add("--seed", type=int, default=0, help="the same seed gives the same text (default: %(default)s)")


def _add(parser: argparse.ArgumentParser, option: Option) -> None:
    """The argument of one option."""
    flag, meaning = _flag(option.name), option.meaning.replace("%", "%%")
    if option.kind is bool:
        parser.add_argument(flag, action="store_true", help=meaning)
        return
    default: float | None = DEFAULTS.get(option.name, option.default)
    shown = f"{default:g}"
    if option.name == "temperature":  # its default is known when --json is
        default, shown = None, f"{shown}; 0 with --json"
    metavar = "N" if option.kind is int else "X"
    parser.add_argument(flag, type=option.kind, default=default, metavar=metavar, help=f"{meaning} (default: {shown})")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def sampling_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Fields of `Generate`. Raises UserError when a value is out of range."""
    options = {option.name: getattr(arguments, option.name) for option in SAMPLING_OPTIONS}
    if options["temperature"] is None:
        options["temperature"] = 0.0 if arguments.json else DEFAULTS["temperature"]
    for name, value in {**options, "logprobs": arguments.logprobs}.items():
        if name in RANGES and value is not None:
            check_range(name, value, RANGES[name])
    check_range("seed", arguments.seed, SEEDS)
    return {
        **options,
        "logit_bias": tuple(map(_bias, arguments.logit_bias)),
        "grammar": None if arguments.json_schema is None else _schema(arguments.json_schema),
        "logprobs": arguments.logprobs,
        "seed": arguments.seed,
    }


def check_range(name: str, value: float, allowed: Range) -> None:
    """Raises UserError that names the option when the value is out of range."""
    if value not in allowed:
        raise UserError(f"{_flag(name)} {value}: {allowed}")


def _bias(text: str) -> Bias:
    token, _, bias = text.partition("=")
    try:
        made = Bias(token=int(token), bias=float(bias))
    except ValueError:
        raise UserError(f"--logit-bias {text}: expected TOKEN=BIAS, a token id and a number") from None
    if not (0 <= made.token < 1 << 31 and -MAX_BIAS <= made.bias <= MAX_BIAS):
        raise UserError(f"--logit-bias {text}: a token id from 0, and a bias between -{MAX_BIAS} and {MAX_BIAS}")
    return made


def _schema(argument: str) -> str:
    """The text itself, or that of a file."""
    if argument == "json" or argument.lstrip().startswith("{"):
        return argument
    try:
        with Path(argument).open(encoding="utf-8") as stream:
            schema = stream.read(MAX_SCHEMA_CHARACTERS + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8"
        raise UserError(f"--json-schema {argument}: {reason}; give a file, or a schema as text") from None
    if len(schema) > MAX_SCHEMA_CHARACTERS:
        raise UserError(f"--json-schema {argument}: more than {MAX_SCHEMA_CHARACTERS:,} characters")
    return schema
