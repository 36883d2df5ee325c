"""The answer to one request: streamed to a person, or one JSON object for a script."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from neuronpipe.launch.client import Client, show_warm_up
from neuronpipe.launch.formats import show_bytes
from neuronpipe.launch.generation.shown_answer import ShownAnswer
from neuronpipe.launch.generation.stream import stream
from neuronpipe.launch.generation.terminal import AnswerOutput
from neuronpipe.launch.progress import SILENT_S
from neuronpipe.plans.number_format import show_number
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.client import Finished, Status, Token, WarmUp
from neuronpipe.protocol.messages.request import Generate

if TYPE_CHECKING:
    from neuronpipe.services.gateway.answers.answer_format import AnswerFormat


def generate(
    client: Client,
    request: Generate,
    *,
    as_json: bool,
    extra_fields: Mapping[str, Any] | None = None,
    run_stays: bool = False,
    form: AnswerFormat | None = None,
    hides_thinking: bool = False,
) -> None:
    """Stream the answer to a person, or print it as one JSON object.

    extra_fields: further fields of the JSON object
    run_stays: whether the run goes on after the request. A line on stderr then says that memory was still warming up,
        however short the request was; otherwise only after SILENT_S
    form: the format of the completion; None if all of it is text
    hides_thinking: whether reasoning is not shown

    Raises Declined if the run refuses the request, UserError if the run ends.
    """
    cold: list[WarmUp] = []  # the warm-up's state before the request, if it was not complete
    began = time.monotonic()

    def note_warm_up(status: Status) -> None:
        if status.warm_up is not None and not status.warm_up.done:
            cold.append(status.warm_up)

    # A prompt that the chat template has written is not for people.
    shown_prompt = (request.prompt or "") if request.frame else ""
    with _Answer(shown_prompt, as_json, extra_fields or {}, form, hides_thinking) as answer:
        for message in stream(client, request, note_warm_up, plain=as_json):
            if isinstance(message, Token):
                answer.add(message)
            else:
                answer.finish(message)
    if cold and not as_json and (run_stays or time.monotonic() - began > SILENT_S):
        print(f"neuronpipe: {_warm_up_notice(cold[0], client.status().warm_up)}", file=sys.stderr)


def _warm_up_notice(before: WarmUp, after: WarmUp | None) -> str:
    percent = 100 * before.loaded_bytes // max(1, before.total_bytes)
    now = "it is warm now" if after is None or after.done else f"now {show_warm_up(after)}"
    return f"memory was {percent} % warm when the request began; {now}. The next request takes less time"


class _Answer:
    """The output of a request.

    The prompt is shown with the first token, so that a refused request shows nothing. An error begins on a new line.
    """

    def __init__(
        self,
        prompt: str,
        as_json: bool,
        extra_fields: Mapping[str, Any],
        form: AnswerFormat | None,
        hides_thinking: bool,
    ) -> None:
        self._prompt, self._as_json, self._extra_fields = prompt, as_json, extra_fields
        self._output = AnswerOutput()
        self._shown = ShownAnswer(form, None if as_json else self._output, hides_thinking=hides_thinking)
        self._tokens: list[Token] = []
        self._has_open_line = False

    def add(self, token: Token) -> None:
        """Show one more token, or collect it for the JSON object."""
        self._tokens.append(token)
        self._show_prompt()
        self._shown.add(token.text)

    def finish(self, finished: Finished) -> None:
        self._show_prompt()
        self._shown.finish()
        if self._as_json:
            reasoning = {"reasoning": self._shown.reasoning} if self._shown.thinks else {}
            fields = to_json(finished, self._tokens) | {"text": self._shown.text, **reasoning}
            print(json.dumps({**fields, **self._extra_fields}))
            return
        self._end_line()
        print(_summary(finished), file=sys.stderr)

    def _show_prompt(self) -> None:
        if not self._has_open_line and not self._as_json:
            self._output.write_trusted(self._prompt)
            self._has_open_line = True

    def _end_line(self) -> None:
        if self._has_open_line:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._has_open_line = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, UserError | KeyboardInterrupt):
            self._end_line()


def _summary(finished: Finished) -> str:
    memory, flash, share = finished.memory, finished.flash, _accelerator_shares(finished).get("accelerator_share")
    offloaded = "" if share is None else f", {share:.0%} of decode's rows by the accelerator"
    return (
        f"[{finished.tokens} tokens, {show_number(finished.tokens_per_s, 0)} tokens/s, "
        f"first after {finished.ttft_ms:.0f} ms; "
        f"memory {show_bytes(memory['peak_bytes'])} of {show_bytes(memory['limit_bytes'])}; "
        f"flash {show_bytes(flash['bytes'])}, miss rate {flash['miss_rate']:.1%}{offloaded}]"
    )


def to_json(finished: Finished, tokens: list[Token]) -> dict[str, Any]:
    """Return the JSON object of `run --json` and `ask --json`."""
    with_logprobs = [token for token in tokens if token.logprob is not None]
    return {
        "text": finished.text,
        "tokens": finished.tokens,
        "token_ids": [token.token for token in tokens],
        **({"logprobs": [_logprobs(token) for token in with_logprobs]} if with_logprobs else {}),
        "prompt_tokens": finished.prompt_tokens,
        "cached_tokens": finished.cached_tokens,
        "drafted_tokens": finished.drafted_tokens,
        "accepted_tokens": finished.accepted_tokens,
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
    """Return the accelerator's shares of the rows of decode steps, without those that are 0.

    accelerator_share: its share of feed-forward rows
    accelerator_matrix_share: its share of rows of attention and output matrices
    """
    rows = {name: finished.decode.get(f"{name}_rows", 0.0) for name in ("gate", "up", "down", "matrix")}
    offloaded = {name: finished.decode.get(f"held_{name}", 0.0) for name in ("rows", "matrix_rows")}
    matrix_rows = rows.pop("matrix")
    ffn_rows = sum(rows.values())
    shares: dict[str, float] = {}
    if offloaded["rows"]:
        shares["accelerator_share"] = offloaded["rows"] / (offloaded["rows"] + ffn_rows)
    if offloaded["matrix_rows"]:
        shares["accelerator_matrix_share"] = offloaded["matrix_rows"] / (offloaded["matrix_rows"] + matrix_rows)
    return shares


def _logprobs(token: Token) -> dict[str, Any]:
    """Return the log-probabilities of one token; bytes that are no whole character show as U+FFFD in its text."""
    top = [{"token": t.token, "text": t.piece.decode(errors="replace"), "logprob": t.logprob} for t in token.top]
    return {"token": token.token, "text": token.piece.decode(errors="replace"), "logprob": token.logprob, "top": top}
