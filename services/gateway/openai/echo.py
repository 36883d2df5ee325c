"""Prompts that are sent back with their answers, and rated: `echo` of plain completions.

Before a prompt is continued it is scored, as `perplexity --path prefill` scores a text: by the same steps, so to the
last bit alike. A score computes every token of its text, whatever other texts share; the answer then finds the keys and
values of the prompt that was scored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from neuronpipe.protocol.messages.client import Accepted, Finished, Rated, Scored, ScoreFinished, Token
from neuronpipe.protocol.messages.request import Generate, Score
from neuronpipe.services.gateway.client.run_client import CoordinatorClient, Mailbox, new_request_id
from neuronpipe.services.gateway.http.api_errors import prompt_too_long
from neuronpipe.services.gateway.http.memory_account import message_bytes
from neuronpipe.services.gateway.openai.response_encoding import DONE, CompletionEncoder, EncodedLogprobs, usage
from neuronpipe.services.gateway.openai.response_sending import (
    COMMENT,
    COMMENT_S,
    COPIES,
    EventStream,
    GenerationResponse,
)

LOOK_AHEAD_BYTES = 16  # of a prompt, for a token that does not follow the one before: what a tokenizer left out


class EchoedPrompt(NamedTuple):
    """A prompt as it is sent back. ratings: of its tokens, as JSON."""

    text: str
    ratings: list[EncodedLogprobs]


def token_offsets(text: str, pieces: Iterable[bytes]) -> list[int]:
    """Where each token begins in the text, in characters. Tokens that the text does not show, a begin token or a blank
    that the tokenizer puts before it, take no room."""
    encoded = text.encode(errors="replace")
    characters, begun = [], -1
    for byte in encoded:
        begun += byte & 0xC0 != 0x80  # the first byte of a character
        characters.append(begun)
    characters.append(len(text))
    places, at = [], 0
    for piece in pieces:
        found = _find(encoded, piece, at)
        blank = _find(encoded, piece[1:], at) if piece.startswith(b" ") else None
        begin, end = min((one for one in (found, blank) if one is not None), default=(at, at))
        places.append(characters[begin])
        at = end
    return places


def _find(text: bytes, piece: bytes, at: int) -> tuple[int, int] | None:
    """Where a piece lies, a little behind this place at most."""
    found = text.find(piece, at, at + LOOK_AHEAD_BYTES + len(piece)) if piece else -1
    return None if found < 0 else (found, found + len(piece))


class EchoEncoder(CompletionEncoder):
    """`/v1/completions` with `echo`. Tokens that end a text are rated too, so that every answer's last token is there;
    `prompts`, one for each `texts_per_prompt` texts, are known once they are scored."""

    texts_per_prompt = 1

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "end_tokens": ()})
        self.prompts: list[EchoedPrompt] = []

    def echoed(self, prompt: str | None, tokens: Sequence[Rated]) -> EchoedPrompt:
        """A scored prompt; the text of one that came as tokens is that of these. Raises Problem when the answer becomes
        too large."""
        pieces = [one.piece for one in tokens]
        text = b"".join(pieces).decode(errors="replace") if prompt is None else prompt
        ratings: list[EncodedLogprobs] = []
        for one, offset in zip(tokens, token_offsets(text, pieces) if self._with_logprobs else (), strict=False):
            token = Token(
                request="", index=0, token=one.token, text="", ms=0.0, logprob=one.logprob, piece=one.piece, top=one.top
            )
            name, logprob, top, place = self._encode_logprobs(token, offset)
            ratings.append((name, logprob, top if one.logprob is not None else "null", place))
            self._count_logprobs(ratings[-1])
        return EchoedPrompt(text, ratings)

    def first(self, number: int) -> bytes:
        """The prompt."""
        prompt = self._prompt(number)
        ratings = self._logprob_lists(prompt.ratings) if self._with_logprobs else "null"
        return self._event(number, self._text_content(prompt.text), ratings, "null")

    def whole(self, sent: Sequence[tuple[int, Finished]], total: dict[str, Any]) -> bytes:
        """The answer, each text after its prompt."""
        for number, _ in sent:
            self._logprobs[number] = self._prompt(number).ratings + self._logprobs.get(number, [])
        texts = [(number, dataclasses.replace(one, text=self._prompt(number).text + one.text)) for number, one in sent]
        return super().whole(texts, _without_cached_tokens(total))

    def usage_chunk(self, total: dict[str, Any]) -> bytes:
        """As in Form; nothing of a scored prompt was there already."""
        return super().usage_chunk(_without_cached_tokens(total))

    def _text_offset(self, number: int, token: Token) -> int:
        return len(self._prompt(number).text) + super()._text_offset(number, token)

    def _prompt(self, number: int) -> EchoedPrompt:
        return self.prompts[number // self.texts_per_prompt]


def _without_cached_tokens(total: dict[str, Any]) -> dict[str, Any]:
    return total | {"prompt_tokens_details": {"cached_tokens": 0}}


class EchoResponse(GenerationResponse):
    """The response to a request with `echo`: prompts are scored first, then continued, unless no token is asked for."""

    _encoder: EchoEncoder

    async def _complete_body(self, coordinator: CoordinatorClient) -> bytes:
        """Score, ask, and make the answer of what comes."""
        await self._score(coordinator, None)
        if self._continues:
            return await super()._complete_body(coordinator)
        sent, total = self._prompts_alone()
        return self._encoder.whole(sent, total)

    async def _stream_body(self, coordinator: CoordinatorClient, stream: EventStream) -> bytes:
        """Score, ask, and pass on what comes; returns the last events."""
        await self._score(coordinator, stream)
        if self._continues:
            return await super()._stream_body(coordinator, stream)
        sent, total = self._prompts_alone()
        events = b"".join(
            self._encoder.first(number) + self._encoder.last(number, finished) for number, finished in sent
        )
        return events + self._encoder.usage_chunk(total) + DONE

    @property
    def _continues(self) -> bool:
        return self._requests[0].max_tokens > 0

    async def _score(self, coordinator: CoordinatorClient, stream: EventStream | None) -> None:
        """Wait until all prompts are scored."""
        self._encoder.texts_per_prompt = self._texts_per_prompt
        requests = self._requests[:: self._texts_per_prompt]
        scores = [
            Score(
                request=new_request_id(),
                text=request.prompt,
                tokens=request.tokens,
                frame=request.frame,
                logprobs=request.logprobs or 0,
                owner=request.owner,
            )
            for request in requests
        ]
        async with self._submitted(coordinator, scores, stream) as mailbox:
            tokens = await self._scored(requests, mailbox, stream)
        self._prompt_tokens = [len(one) for one in tokens]
        before = self._encoder.logprob_characters
        self._encoder.prompts = [
            self._encoder.echoed(request.prompt, scored) for request, scored in zip(requests, tokens, strict=True)
        ]
        self._charge.grow(COPIES * (self._encoder.logprob_characters - before))

    async def _scored(
        self, requests: Sequence[Generate], mailbox: Mailbox, stream: EventStream | None
    ) -> Sequence[Sequence[Rated]]:
        """The tokens of all prompts; comments go to the stream while there are none."""
        tokens: list[list[Rated]] = [[] for _ in requests]
        left = len(requests)
        while left:
            taken = await mailbox.take(None if stream is None else COMMENT_S)
            if stream is not None and not taken:
                await stream.send_events(COMMENT)
            for number, message in taken:
                if isinstance(message, Accepted) and requests[number].max_tokens:
                    if message.prompt_tokens >= self._context_tokens:
                        raise prompt_too_long(self._context_tokens, message.prompt_tokens)
                elif isinstance(message, Scored):  # a restarted coordinator begins anew, with the same
                    self._charge.grow(message_bytes(message))
                    tokens[number][message.position + bool(message.position) :] = message.rated
                elif isinstance(message, ScoreFinished):
                    left -= 1
        return tokens

    def _prompts_alone(self) -> tuple[list[tuple[int, Finished]], dict[str, int]]:
        """What is sent without a token of an answer, and what it took."""
        per_prompt = self._texts_per_prompt
        finished = [
            empty_completion(self._prompt_tokens[number // per_prompt]) for number in range(len(self._requests))
        ]
        sent = [(number, one) for number, one in enumerate(finished) if number % per_prompt < self._sent_per_prompt]
        return sent, usage(finished, per_prompt)


def empty_completion(prompt_tokens: int) -> Finished:
    """The account of a text without a token."""
    return Finished(
        request="",
        reason="length",
        text="",
        tokens=0,
        prompt_tokens=prompt_tokens,
        ttft_ms=0.0,
        tokens_per_s=0.0,
        tbt_ms={},
        memory={},
        flash={},
        prefill={},
        decode={},
        plan="",
        mode="exact",
    )
