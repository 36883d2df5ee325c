"""`echo` of plain completions: prompts that are returned before their completions, with log-probabilities.

A prompt is scored before it is continued, by the same steps as `perplexity --path prefill`, so that the numbers are the
same to the last bit. A score computes every token of the prompt, even if another sequence shares it; the completion
then reuses the keys and values of the score.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from neuronpipe.protocol.messages.client import Accepted, Finished, Rated, Scored, ScoreFinished, Token
from neuronpipe.protocol.messages.request import Generate, Score
from neuronpipe.services.gateway.client.mailbox import Mailbox
from neuronpipe.services.gateway.client.run_client import CoordinatorClient, new_request_id
from neuronpipe.services.gateway.http.api_errors import prompt_too_long
from neuronpipe.services.gateway.http.memory_account import message_bytes
from neuronpipe.services.gateway.openai.response_encoding import (
    DONE,
    CompletionEncoder,
    EncodedLogprobs,
    usage,
)
from neuronpipe.services.gateway.openai.response_sending import (
    COMMENT_S,
    COPIES,
    EventStream,
    GenerationResponse,
)

LOOK_AHEAD_BYTES = 16  # how far ahead a token is searched in the prompt, since tokenizers may drop characters


class EchoedPrompt(NamedTuple):
    """A prompt as it is returned, with the encoded log-probabilities of its tokens."""

    text: str
    logprobs: list[EncodedLogprobs]


def token_offsets(text: str, pieces: Iterable[bytes]) -> list[int]:
    """Return where each token begins in the text, in characters.

    Tokens that are not in the text, such as a begin token or a space that the tokenizer adds, have length 0: they begin
    where the next token does.
    """
    encoded = text.encode(errors="replace")
    characters, begun = [], -1
    for byte in encoded:
        begun += byte & 0xC0 != 0x80  # the first byte of a character
        characters.append(begun)
    characters.append(len(text))
    offsets, at = [], 0
    for piece in pieces:
        span = _find(encoded, piece, at)
        span_without_space = _find(encoded, piece[1:], at) if piece.startswith(b" ") else None
        begin, end = min((match for match in (span, span_without_space) if match is not None), default=(at, at))
        offsets.append(characters[begin])
        at = end
    return offsets


def _find(text: bytes, piece: bytes, at: int) -> tuple[int, int] | None:
    """Return begin and end of a piece, at most LOOK_AHEAD_BYTES behind `at`; None if it is not there."""
    begin = text.find(piece, at, at + LOOK_AHEAD_BYTES + len(piece)) if piece else -1
    return None if begin < 0 else (begin, begin + len(piece))


class EchoEncoder(CompletionEncoder):
    """The encoder of `/v1/completions` with `echo`.

    End tokens have log-probabilities too, so that a client that drops the last token drops none of the prompt's.

    prompts: the scored prompts, one for each `sequences_per_prompt` sequences; set before anything is encoded
    """

    sequences_per_prompt = 1

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "end_tokens": ()})
        self.prompts: list[EchoedPrompt] = []

    def echoed(self, prompt: str | None, tokens: Sequence[Rated]) -> EchoedPrompt:
        """Encode a scored prompt. Raises ApiError if the response becomes too large.

        prompt: its text; None if it was sent as token ids, which are then decoded
        """
        pieces = [rated.piece for rated in tokens]
        text = b"".join(pieces).decode(errors="replace") if prompt is None else prompt
        logprobs: list[EncodedLogprobs] = []
        for rated, offset in zip(tokens, token_offsets(text, pieces) if self._with_logprobs else (), strict=False):
            token = Token(
                request="",
                index=0,
                token=rated.token,
                text="",
                ms=0.0,
                logprob=rated.logprob,
                piece=rated.piece,
                top=rated.top,
            )
            name, logprob, top, encoded_offset = self._encode_logprobs(token, offset)
            logprobs.append((name, logprob, top if rated.logprob is not None else "null", encoded_offset))
            self._count_logprobs(logprobs[-1])
        return EchoedPrompt(text, logprobs)

    def first(self, number: int) -> bytes:
        prompt = self._prompt(number)
        logprobs = self._logprob_lists(prompt.logprobs) if self._with_logprobs else "null"
        return self._event(number, self._text_content(prompt.text), logprobs, "null")

    def whole(self, sent: Sequence[tuple[int, Finished]], total: dict[str, Any]) -> bytes:
        """Return the body of a whole response, with each completion after its prompt."""
        for number, _ in sent:
            self._logprobs[number] = self._prompt(number).logprobs + self._logprobs.get(number, [])
        echoed = [
            (number, dataclasses.replace(finished, text=self._prompt(number).text + finished.text))
            for number, finished in sent
        ]
        return super().whole(echoed, _without_cached_tokens(total))

    def usage_chunk(self, total: dict[str, Any]) -> bytes:
        return super().usage_chunk(_without_cached_tokens(total))

    def _text_offset(self, number: int, token: Token) -> int:
        return len(self._prompt(number).text) + super()._text_offset(number, token)

    def _prompt(self, number: int) -> EchoedPrompt:
        return self.prompts[number // self.sequences_per_prompt]


def _without_cached_tokens(total: dict[str, Any]) -> dict[str, Any]:
    """Set `cached_tokens` to 0: the completion reuses the score of its own request, not of an earlier one."""
    return total | {"prompt_tokens_details": {"cached_tokens": 0}}


class EchoResponse(GenerationResponse):
    """The response to a request with `echo`: prompts are scored, and then continued unless `max_tokens` is 0."""

    _encoder: EchoEncoder

    async def _complete_body(self, coordinator: CoordinatorClient) -> bytes:
        await self._score(coordinator, None)
        if self._continues:
            return await super()._complete_body(coordinator)
        sent, total = self._prompts_alone()
        return self._encoder.whole(sent, total)

    async def _stream_body(self, coordinator: CoordinatorClient, stream: EventStream) -> bytes:
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
        self._encoder.sequences_per_prompt = self._sequences_per_prompt
        requests = self._requests[:: self._sequences_per_prompt]
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
        self._prompt_tokens = [len(prompt) for prompt in tokens]
        before = self._encoder.logprob_characters
        self._encoder.prompts = [
            self._encoder.echoed(request.prompt, scored) for request, scored in zip(requests, tokens, strict=True)
        ]
        self._charge.grow(COPIES * (self._encoder.logprob_characters - before))

    async def _scored(
        self, requests: Sequence[Generate], mailbox: Mailbox, stream: EventStream | None
    ) -> Sequence[Sequence[Rated]]:
        """Return the scored tokens of all prompts; keep the stream alive while none arrive."""
        tokens: list[list[Rated]] = [[] for _ in requests]
        unfinished = len(requests)
        while unfinished:
            messages = await mailbox.take(None if stream is None else COMMENT_S)
            if stream is not None and not messages:
                await stream.send_events(self._encoder.keep_alive)
            for number, message in messages:
                if isinstance(message, Accepted) and requests[number].max_tokens:
                    if message.prompt_tokens >= self._context_tokens:
                        raise prompt_too_long(self._context_tokens, message.prompt_tokens)
                elif isinstance(message, Scored):  # a restarted coordinator sends the same tokens from the beginning
                    self._charge.grow(message_bytes(message))
                    tokens[number][message.position + bool(message.position) :] = message.rated
                elif isinstance(message, ScoreFinished):
                    unfinished -= 1
        return tokens

    def _prompts_alone(self) -> tuple[list[tuple[int, Finished]], dict[str, int]]:
        """Return the results and the token counts of a request without completion tokens."""
        per_prompt = self._sequences_per_prompt
        finished = [
            empty_completion(self._prompt_tokens[number // per_prompt]) for number in range(len(self._requests))
        ]
        sent = [
            (number, result) for number, result in enumerate(finished) if number % per_prompt < self._sent_per_prompt
        ]
        return sent, usage(finished, per_prompt)


def empty_completion(prompt_tokens: int) -> Finished:
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
