"""Asking for text: the arguments that `run` and `ask` share, the stream a person reads, and the JSON a script reads."""

from __future__ import annotations

import argparse
import io
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from neuronpipe.launch.arguments.sampling import add_sampling_arguments, check_range, sampling_options
from neuronpipe.launch.chat.conversation import MAX_PROMPT_CHARACTERS
from neuronpipe.launch.chat.wrapping import SoftWrap
from neuronpipe.launch.client import Client, show_warm_up, starting
from neuronpipe.launch.formats import ONLY_UTF8, parse_text, show_bytes
from neuronpipe.launch.progress import CANNOT_WIPE, SILENT_S, Elapsed, heard
from neuronpipe.plans.number_format import show_number
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.client import Accepted, Finished, Status, Token, WarmUp
from neuronpipe.protocol.messages.request import RANGES, Generate

MAX_TOKENS = 200  # unless a person asks for more
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and new line


def add_generation_arguments(parser: argparse.ArgumentParser) -> None:
    """Prompt and sampling."""
    parser.add_argument(
        "-p",
        "--prompt",
        metavar="TEXT",
        type=parse_text,
        help="what to say to the model; a base model continues it (default: standard input)",
    )
    add_conversation_arguments(parser)
    parser.add_argument(
        "--raw", action="store_true", help="continue the text as it stands, without the model's chat template"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def add_conversation_arguments(
    parser: argparse.ArgumentParser,
    *,
    max_tokens: int | None = MAX_TOKENS,
    shown: str = "%(default)s",
    logprobs: bool = True,
) -> None:
    """What holds for one text as for all of a conversation. max_tokens, shown: the default of -n, and how help shows
    it. logprobs: whether there is a place to show them."""
    parser.add_argument(
        "--system", type=parse_text, metavar="TEXT", help="what the model is told before (needs a chat template)"
    )
    parser.add_argument(
        "-n",
        "--max-tokens",
        type=int,
        default=max_tokens,
        metavar="N",
        help=f"most tokens to generate (default: {shown})",
    )
    add_sampling_arguments(parser, logprobs=logprobs)
    parser.add_argument(
        "--stop",
        action="append",
        type=parse_text,
        default=[],
        metavar="TEXT",
        help="end the text before TEXT; may be given again",
    )


def generate_request(arguments: argparse.Namespace) -> Generate:
    """The request the arguments describe. Raises UserError when a value is out of range."""
    if arguments.raw and arguments.system is not None:
        raise UserError("--system and --raw: only a chat template has a place for it; leave one out")
    if arguments.logprobs is not None and not arguments.json:
        raise UserError("--logprobs: only with --json, which has a place for them")
    options = sampled_as_asked(arguments)
    prompt = arguments.prompt if arguments.prompt is not None else _standard_input(getattr(arguments, "package", None))
    if not prompt:
        raise UserError("the prompt is empty: give -p TEXT, or pipe a text into standard input")
    if len(prompt) > MAX_PROMPT_CHARACTERS:
        raise UserError(f"the prompt has more than {MAX_PROMPT_CHARACTERS:,} characters: give a shorter one")
    return Generate(request="1", prompt=prompt, **options)


def sampled_as_asked(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of `Generate` but for what is said. Raises UserError when a value is out of range."""
    check_range("max_tokens", arguments.max_tokens, RANGES["max_tokens"])
    return {"max_tokens": arguments.max_tokens, "stop": tuple(arguments.stop), **sampling_options(arguments)}


def _standard_input(package: Path | None) -> str:
    """The prompt that is piped in. package: with which a person at a terminal could chat instead."""
    if sys.stdin.isatty():
        from neuronpipe.launch.planning import DEMO  # only a mistake pays for it
        from neuronpipe.plans.pull.package_library import packages_folder

        word = ""
        if package is not None and package != DEMO:
            word = " " + shlex.quote(package.name if package.parent == packages_folder() else str(package))
        raise UserError(
            "no prompt: give TEXT or -p TEXT, or pipe a text into standard input; "
            f"`neuronpipe chat{word}` holds a conversation"
        )
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        prompt = sys.stdin.read(MAX_PROMPT_CHARACTERS + 1)
        heard()
        return prompt
    except UnicodeDecodeError:
        raise UserError(f"standard input: {ONLY_UTF8}") from None


def generate(
    client: Client,
    arguments: argparse.Namespace,
    ask: Generate,
    beside: Mapping[str, Any] | None = None,
    *,
    stays: bool = False,
) -> None:
    """Stream the text to a person, or print the JSON object, with the fields of `beside`. stderr says what the first
    token waits for, and that memory was warming up: when that took time, or when the run stays and will be asked more.
    """
    cold: list[WarmUp] = []  # how far memory was warmed up before, if it was not
    began = time.monotonic()

    def seen_before(status: Status) -> None:
        if status.warm_up is not None and not status.warm_up.done:
            cold.append(status.warm_up)

    shown = ask.prompt if ask.frame else None  # what a template has written is not for people
    with _Answer(shown or "", arguments.json, beside or {}) as answer:
        for message in followed(client, ask, seen_before, plain=arguments.json):
            if isinstance(message, Token):
                answer.take(message)
            else:
                answer.finish(message)
    if cold and not arguments.json and (stays or time.monotonic() - began > SILENT_S):
        print(f"neuronpipe: {_was_cold(cold[0], client.status().warm_up)}", file=sys.stderr)


def followed(
    client: Client,
    ask: Generate,
    seen_before: Callable[[Status], None] = lambda status: None,
    *,
    plain: bool = False,
) -> Iterator[Token | Finished]:
    """The text as it comes, each token once. Meanwhile stderr says what the first one waits for. seen_before: told once
    how the run was before the request. plain: lines, not one that changes. Raises Declined, UserError."""
    prompt_tokens = tokens = 0

    def quiet(status: Status | None) -> None:
        elapsed.say(_awaited(status, prompt_tokens))

    with Elapsed(plain=plain) as elapsed:
        for message in client.request(ask, quiet, seen_before):
            if isinstance(message, Accepted):
                prompt_tokens = message.prompt_tokens
            elif isinstance(message, Token):
                elapsed.end()
                if message.index == tokens:  # or it comes again, after the coordinator was restarted
                    tokens += 1
                    yield message
            elif isinstance(message, Finished):
                elapsed.end()
                yield message


def _was_cold(before: WarmUp, after: WarmUp | None) -> str:
    """What a text waited for that was asked while memory warmed up."""
    share = 100 * before.loaded_bytes // max(1, before.total_bytes)
    now = "it is warm now" if after is None or after.done else f"now {show_warm_up(after)}"
    return f"memory was warming up when this was asked, {share} % of it; {now}. The next text takes less time"


def _awaited(status: Status | None, prompt_tokens: int) -> str:
    """What the first token waits for."""
    prompt = f"the prompt, {prompt_tokens:,} token{'s' if prompt_tokens > 1 else ''}"
    if not prompt_tokens:
        return awaited(None, prompt)
    if status is not None and status.ready and status.sequences_waiting:
        return f"waiting for a place, or reading {prompt}; {status.sequences_waiting} texts wait"
    return awaited(status, f"reading {prompt}")


def awaited(status: Status | None, doing: str) -> str:
    """What a run does that was asked for something. doing: what that is, once it can. None: it has not told yet."""
    if status is None or not status.ready:
        return starting(status)
    if notes := status.notes():
        return f"{doing}: {notes}"
    if status.warm_up is not None and not status.warm_up.done:
        return f"{doing}, while memory warms up: {show_warm_up(status.warm_up)}"
    return doing


class _Answer:
    """What comes of a request: the prompt and the text, streamed to a person; or a JSON object at the end. The prompt
    is shown with the first token: a request that is refused is not repeated. What goes wrong is said on a line of its
    own, not behind the text."""

    def __init__(self, prompt: str, as_json: bool, beside: Mapping[str, Any]) -> None:
        self._prompt, self._as_json, self._beside = prompt, as_json, beside
        self._screen = Screen()
        self._tokens: list[Token] = []
        self._open = False  # a line is begun and not ended

    def take(self, token: Token) -> None:
        """One more token."""
        self._tokens.append(token)
        if not self._as_json:
            self._show(token.text)

    def finish(self, finished: Finished) -> None:
        if self._as_json:
            print(json.dumps({**to_json(finished, self._tokens), **self._beside}))
            return
        self._show("")
        self._end_line()
        print(_summary(finished), file=sys.stderr)

    def _show(self, text: str) -> None:
        if not self._open:
            self._screen.write_own(self._prompt)
        self._screen.write(text)
        self._open = True

    def _end_line(self) -> None:
        if self._open:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, UserError | KeyboardInterrupt):
            self._end_line()


class Screen:
    """Where one answer is streamed to: a terminal, whose lines are broken at blanks, or a pipe, which gets it all."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._wrap: Callable[[str], str] = str
        if self._is_terminal and os.environ.get("TERM", "") not in CANNOT_WIPE:
            self._wrap = SoftWrap(lambda: shutil.get_terminal_size().columns).feed

    def write(self, text: str) -> None:
        """Show what a model wrote, at once."""
        self.write_own(for_terminal(text) if self._is_terminal else text)

    def write_own(self, text: str) -> None:
        """Show what a person wrote, control characters included."""
        sys.stdout.write(self._wrap(text))
        sys.stdout.flush()


def for_terminal(text: str) -> str:
    """What a model wrote, control characters replaced: packages come from strangers, and a terminal would obey."""
    return CONTROLS.sub("\N{REPLACEMENT CHARACTER}", text)


def _summary(finished: Finished) -> str:
    memory, flash, share = finished.memory, finished.flash, _accelerator_shares(finished).get("accelerator_share")
    held = "" if share is None else f", {share:.0%} of decode's rows by the accelerator"
    return (
        f"[{finished.tokens} tokens, {show_number(finished.tokens_per_s, 0)} tokens/s, "
        f"first after {finished.ttft_ms:.0f} ms; "
        f"memory {show_bytes(memory['peak_bytes'])} of {show_bytes(memory['limit_bytes'])}; "
        f"flash {show_bytes(flash['bytes'])}, miss rate {flash['miss_rate']:.1%}{held}]"
    )


def to_json(finished: Finished, tokens: list[Token]) -> dict[str, Any]:
    """The JSON object of `run --json` and `ask --json`."""
    with_logprobs = [token for token in tokens if token.logprob is not None]
    return {
        "text": finished.text,
        "tokens": finished.tokens,
        "token_ids": [token.token for token in tokens],
        **({"logprobs": [_logprobs(token) for token in with_logprobs]} if with_logprobs else {}),
        "prompt_tokens": finished.prompt_tokens,
        "cached_tokens": finished.cached_tokens,
        "reason": finished.reason,
        "ttft_ms": finished.ttft_ms,
        "tokens_per_s": finished.tokens_per_s,
        "tbt_ms": finished.tbt_ms,
        "memory": finished.memory,
        "flash": {**finished.flash, "bytes": int(finished.flash["bytes"]), "reads": int(finished.flash["reads"])},
        **_accelerator_shares(finished),
        "plan": finished.plan,
        "mode": finished.mode,
    }


def _accelerator_shares(finished: Finished) -> dict[str, float]:
    """Of the rows that its decode steps computed, those of the accelerator, if it computed any: of neurons, and of
    attention's matrices and the output matrix."""
    rows = {name: finished.decode.get(f"{name}_rows", 0.0) for name in ("gate", "up", "down", "matrix")}
    held = {name: finished.decode.get(f"held_{name}", 0.0) for name in ("rows", "matrix_rows")}
    of_neurons, of_matrices = sum(rows.values()) - rows["matrix"], rows["matrix"]
    shares: dict[str, float] = {}
    if held["rows"]:
        shares["accelerator_share"] = held["rows"] / (held["rows"] + of_neurons)
    if held["matrix_rows"]:
        shares["accelerator_matrix_share"] = held["matrix_rows"] / (held["matrix_rows"] + of_matrices)
    return shares


def _logprobs(token: Token) -> dict[str, Any]:
    """How likely one token was; bytes that are no whole character show as U+FFFD in its text."""
    top = [{"token": t.token, "text": t.piece.decode(errors="replace"), "logprob": t.logprob} for t in token.top]
    return {"token": token.token, "text": token.piece.decode(errors="replace"), "logprob": token.logprob, "top": top}
