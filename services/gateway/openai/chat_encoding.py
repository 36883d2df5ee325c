"""Encoding completions of conversations: reasoning, text and function calls, as in OpenAI's chat completions.

The encoders of other APIs for conversations derive from `ChatEncoder`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from neuronpipe.protocol.messages.client import Finished, Token
from neuronpipe.services.gateway.answers.answer_format import PLAIN, AnswerFormat, Call, parse_answer
from neuronpipe.services.gateway.answers.parts import Arguments, CallStart, Content, Parser, Part, Reasoning
from neuronpipe.services.gateway.openai.response_encoding import (
    EncodedLogprobs,
    ResponseEncoder,
    logprob_entry,
    top_with_sampled,
)


class ChatEncoder(ResponseEncoder):
    """The encoder of responses of `/v1/chat/completions`.

    answer: the format of the completion
    """

    call_reason = "tool_calls"  # the finish reason of a completion that ends with a complete call
    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"
    _empty_content = '"delta": {}'
    _logprob_keys, _logprob_suffix = ("content",), ', "refusal": null'

    def __init__(self, *about: Any, answer: AnswerFormat = PLAIN, **more: Any) -> None:
        super().__init__(*about, **more)
        self._answer = answer
        self._parsers: dict[int, Parser] = {}
        self._reasoning_tokens = 0

    def _push(self, number: int, token: Token) -> list[Part]:
        """Parse a token of a sequence, and count it if reasoning goes on after it."""
        parser = self._parser(number)
        parts = list(parser.push(token.text))
        self._reasoning_tokens += parser.thinking and token.token not in self._end_tokens
        return parts

    def _parser(self, number: int) -> Parser:
        if number not in self._parsers:
            self._parsers[number] = self._answer.parser()
        return self._parsers[number]

    # ---- streams ---------------------------------------------------------------------------------------------
    def first(self, number: int) -> bytes:
        """Return the chunk that names the role; its content is null if other parts may come before text."""
        content = '""' if self._answer.is_text else "null"
        return self._event(number, f'"delta": {{"role": "assistant", "content": {content}}}', "null", "null")

    def piece(self, number: int, token: Token) -> bytes:
        """Return the chunks of a token. Without log-probabilities there are none while its text may begin a call."""
        if self._answer.is_text:
            return super().piece(number, token)
        deltas = [self._delta(part) for part in self._push(number, token)]
        rated = self._with_logprobs and token.token not in self._end_tokens
        if not rated:
            return b"".join(self._event(number, delta, "null", "null") for delta in deltas)
        logprobs = self._logprob_lists([self._encode_logprobs(token, self._text_offset(number, token))])
        first, *later_deltas = deltas or [self._empty_content]
        events = [self._event(number, first, logprobs, "null")]
        return b"".join(events + [self._event(number, delta, "null", "null") for delta in later_deltas])

    def last(self, number: int, finished: Finished) -> bytes:
        """Return the chunks of held back text and the chunk that ends a sequence."""
        parts = self._parser(number).finish()
        events = [self._event(number, self._delta(part), "null", "null") for part in parts]
        del self._parsers[number]
        return b"".join(events) + super().last(number, finished)

    def usage_chunk(self, total: dict[str, Any]) -> bytes:
        return super().usage_chunk(self._with_reasoning(total))

    def _delta(self, part: Part) -> str:
        if isinstance(part, Content):
            return self._text_content(part.text)
        if isinstance(part, Reasoning):
            return f'"delta": {{"reasoning_content": {json.dumps(part.text)}}}'
        return f'"delta": {json.dumps(self._call_delta(part))}'

    def _call_delta(self, part: CallStart | Arguments) -> dict[str, Any]:
        if isinstance(part, CallStart):
            return {"tool_calls": [{"index": part.call, **self._call(part.name, "")}]}
        return {"tool_calls": [{"index": part.call, "function": {"arguments": part.text}}]}

    # ---- whole responses -------------------------------------------------------------------------------------
    def take(self, number: int, token: Token) -> None:
        super().take(number, token)
        if self._answer.thinking is not None:
            self._push(number, token)

    def whole(self, sent: Sequence[tuple[int, Finished]], total: dict[str, Any]) -> bytes:
        return super().whole(sent, self._with_reasoning(total))

    def _with_reasoning(self, total: dict[str, Any]) -> dict[str, Any]:
        """Return token counts with the number of reasoning tokens, if the model has any."""
        if self._answer.thinking is None:
            return total
        details = total["completion_tokens_details"] | {"reasoning_tokens": self._reasoning_tokens}
        return total | {"completion_tokens_details": details}

    def _content(self, finished: Finished) -> dict[str, Any]:
        answer = parse_answer(finished.text, self._answer)
        message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
        if answer.reasoning:
            message["reasoning_content"] = answer.reasoning
        if answer.calls:
            message |= {"content": answer.text or None, **self._call_members(answer.calls)}
        return {"message": message}

    def _call_members(self, calls: Sequence[Call]) -> dict[str, Any]:
        """Return the members of a whole message that have its calls."""
        return {"tool_calls": [self._call(*call) for call in calls]}

    def _reason(self, finished: Finished) -> str:
        reason = super()._reason(finished)
        may_call = reason == "stop" and self._answer.calls is not None
        return self.call_reason if may_call and parse_answer(finished.text, self._answer).complete else reason

    # ---- both ------------------------------------------------------------------------------------------------
    def _call(self, name: str, arguments: str) -> dict[str, Any]:
        function = {"name": name, "arguments": arguments}
        return {"id": self._new_call_id(), "type": "function", "function": function}

    def _new_call_id(self) -> str:
        """Return a new id for a call, in the form that the template accepts."""
        assert self._answer.calls is not None
        return self._answer.calls.id_of(f"call_{os.urandom(12).hex()}")

    def _text_content(self, text: str) -> str:
        return f'"delta": {{"content": {json.dumps(text)}}}'

    def _encode_logprobs(self, token: Token, offset: int) -> EncodedLogprobs:
        likely_tokens = top_with_sampled(token) if token.top else ()
        top = [logprob_entry(likely.piece, likely.logprob) for likely in likely_tokens]
        return (json.dumps({**logprob_entry(token.piece, token.logprob), "top_logprobs": top}),)


class FunctionCallEncoder(ChatEncoder):
    """The encoder of `/v1/chat/completions` with `functions`, the older form of tools: one call, without an id."""

    call_reason = "function_call"

    def _call_delta(self, part: CallStart | Arguments) -> dict[str, Any]:
        if isinstance(part, CallStart):
            return {"function_call": {"name": part.name, "arguments": ""}}
        return {"function_call": {"arguments": part.text}}

    def _call_members(self, calls: Sequence[Call]) -> dict[str, Any]:
        (call,) = calls
        return {"function_call": call._asdict()}
