"""The options of a request, declared on a parser. A verb turns its parsed arguments into `GenerationOptions` once.

`Generate` declares most sampling options: names, defaults, ranges and help texts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from neuronpipe.launch.arguments.values import parse_text
from neuronpipe.launch.generation.options import SEEDS, GenerationOptions, SamplingOptions
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.marks import Range
from neuronpipe.protocol.messages.request import MAX_BIAS, RANGES, SAMPLING_OPTIONS, Bias
from neuronpipe.protocol.options import Option

DEFAULT_MAX_TOKENS = 200
DEFAULTS = {"temperature": 0.8, "top_p": 0.95}  # where they differ from those of `Generate`
MAX_SCHEMA_CHARACTERS = 1 << 20

COMMON = ("prompt", "system", "max_tokens", "temperature", "seed", "raw", "json")
"""The options of a request that the short help of a verb shows."""


def add_generation_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that `generation_options` reads."""
    parser.add_argument(
        "-p",
        "--prompt",
        metavar="TEXT",
        type=parse_text,
        help="the prompt; a base model continues it (default: standard input)",
    )
    add_sampling_arguments(parser)
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")
    add_thinking_argument(parser)


def add_thinking_argument(parser: argparse.ArgumentParser) -> None:
    """Declare the option that hides reasoning."""
    parser.add_argument(
        "--hide-thinking",
        action="store_true",
        help="do not show what the model thinks before it answers; it is dimmed, and never goes into a pipe",
    )


def add_sampling_arguments(
    parser: argparse.ArgumentParser,
    *,
    max_tokens: int | None = DEFAULT_MAX_TOKENS,
    default_shown: str = "%(default)s",
    has_logprobs: bool = True,
) -> None:
    """Declare the options that `sampling_options` reads, and --system.

    max_tokens, default_shown: the default of -n, and how the help shows it
    has_logprobs: whether the verb has an output for log-probabilities
    """
    parser.add_argument(
        "--system", type=parse_text, metavar="TEXT", help="system message (the model needs a chat template)"
    )
    parser.add_argument(
        "-n",
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help=f"maximum number of tokens to generate (default: {default_shown})",
    )
    for option in SAMPLING_OPTIONS:
        _add_declared(parser, option, has_json=has_logprobs)
    parser.add_argument(
        "--logit-bias",
        action="append",
        default=[],
        metavar="TOKEN=BIAS",
        help="add BIAS to the logit of a token id; -100 bans it; may be repeated",
    )
    parser.add_argument(
        "--json-schema",
        type=parse_text,
        metavar="FILE|TEXT",
        help="constrain the answer to JSON of this schema; 'json' allows any object",
    )
    if has_logprobs:
        parser.add_argument(
            "--logprobs",
            type=int,
            metavar="N",
            help="with --json: report log-probabilities, and the N most likely tokens at each position",
        )
    else:
        parser.set_defaults(logprobs=None, json=False)
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed; the same seed gives the same text (default: %(default)s)"
    )
    parser.add_argument(
        "--stop",
        action="append",
        type=parse_text,
        default=[],
        metavar="TEXT",
        help="stop before TEXT; may be repeated",
    )


def _add_declared(parser: argparse.ArgumentParser, option: Option, *, has_json: bool) -> None:
    flag, meaning = _flag(option.name), option.meaning.replace("%", "%%")
    if option.kind is bool:
        parser.add_argument(flag, action="store_true", help=meaning)
        return
    default: float | None = DEFAULTS.get(option.name, option.default)
    default_shown = f"{default:g}"
    if option.name == "temperature":  # depends on --json, which may come later on the command line
        default, default_shown = None, f"{default_shown}; 0 with --json" if has_json else default_shown
    metavar = "N" if option.kind is int else "X"
    help_text = f"{meaning} (default: {default_shown})"
    parser.add_argument(flag, type=option.kind, default=default, metavar=metavar, help=help_text)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def generation_options(arguments: argparse.Namespace) -> GenerationOptions:
    """Return the checked options of one request. Raises UserError if a value is out of range or contradicts another."""
    if arguments.raw and arguments.system is not None:
        raise UserError("--system and --raw: a system message needs the chat template; leave one of the two out")
    if arguments.logprobs is not None and not arguments.json:
        raise UserError("--logprobs: only with --json, which has a place for them")
    return GenerationOptions(
        prompt=arguments.prompt,
        system=arguments.system,
        raw=arguments.raw,
        as_json=arguments.json,
        hides_thinking=arguments.hide_thinking,
        sampling=sampling_options(arguments),
    )


def sampling_options(arguments: argparse.Namespace) -> SamplingOptions:
    """Return the checked sampling options. Raises UserError if a value is out of range."""
    check_range("max_tokens", arguments.max_tokens, RANGES["max_tokens"])
    declared = {option.name: getattr(arguments, option.name) for option in SAMPLING_OPTIONS}
    if declared["temperature"] is None:
        declared["temperature"] = 0.0 if arguments.json else DEFAULTS["temperature"]
    for name, value in {**declared, "logprobs": arguments.logprobs}.items():
        if name in RANGES and value is not None:
            check_range(name, value, RANGES[name])
    check_range("seed", arguments.seed, SEEDS)
    return SamplingOptions(
        max_tokens=arguments.max_tokens,
        stop=tuple(arguments.stop),
        declared=declared,
        logit_bias=tuple(map(_parse_bias, arguments.logit_bias)),
        grammar=None if arguments.json_schema is None else _read_schema(arguments.json_schema),
        logprobs=arguments.logprobs,
        seed=arguments.seed,
    )


def check_range(name: str, value: float, allowed: Range) -> None:
    """Raise UserError, with the option's name, if the value is out of range."""
    if value not in allowed:
        raise UserError(f"{_flag(name)} {value}: {allowed}")


def _parse_bias(text: str) -> Bias:
    token, _, value = text.partition("=")
    try:
        bias = Bias(token=int(token), bias=float(value))
    except ValueError:
        raise UserError(f"--logit-bias {text}: expected TOKEN=BIAS, a token id and a number") from None
    if not (0 <= bias.token < 1 << 31 and -MAX_BIAS <= bias.bias <= MAX_BIAS):
        raise UserError(f"--logit-bias {text}: a token id from 0, and a bias between -{MAX_BIAS} and {MAX_BIAS}")
    return bias


def _read_schema(argument: str) -> str:
    """Return the schema itself, or that of a file."""
    if argument == "json" or argument.lstrip().startswith("{"):
        return argument
    try:
        with Path(argument).open(encoding="utf-8") as stream:
            schema = stream.read(MAX_SCHEMA_CHARACTERS + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UserError(f"--json-schema {argument}: {reason}; give a file, or a schema as text") from None
    if len(schema) > MAX_SCHEMA_CHARACTERS:
        raise UserError(f"--json-schema {argument}: more than {MAX_SCHEMA_CHARACTERS:,} characters")
    return schema
