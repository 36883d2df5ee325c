"""Infill (fill in the middle): prompts with a gap, in the format that a model was trained on.

The format is found by its tokens: the run's tokenizer is asked once which of the names below are single tokens, and the
first format whose tokens all exist is the model's. The formats are listed here because packages do not contain them.

The prompt of most formats is text. CodeLlama was trained on suffixes without the space that its tokenizer adds before
every text. As in its authors' code, MARK and the suffix are encoded together, and the tokens of MARK are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from neuronpipe.protocol.messages.request import Generate, Tokenize
from neuronpipe.services.gateway.client.run_client import AcquireRun, CoordinatorClient, new_request_id, tokenize_all
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.openai.response_sending import EventStream, GenerationResponse

PREFIX, SUFFIX = "{prefix}", "{suffix}"
MARK = "☺"


class InfillFormat(NamedTuple):
    """A prompt format for infill.

    parts: names of tokens, PREFIX and SUFFIX, in the order of the prompt
    ends: tokens that such models generate after the infill, besides their end tokens
    bare: True if the suffix must not have the space that the tokenizer adds before a text
    """

    parts: tuple[str, ...]
    ends: tuple[str, ...] = ()
    bare: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the tokens that identify the format."""
        return tuple(part for part in self.parts if part not in (PREFIX, SUFFIX))

    def prompt(self, prefix: str, suffix: str) -> str:
        texts = {PREFIX: prefix, SUFFIX: suffix}
        return "".join(texts.get(part, part) for part in self.parts)


INFILL_FORMATS = (
    InfillFormat(
        ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    ),
    InfillFormat(
        ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"),
        ("<fim_pad>", "<file_sep>", "<|endoftext|>"),
    ),
    InfillFormat(("<fim-prefix>", PREFIX, "<fim-suffix>", SUFFIX, "<fim-middle>"), ("<|endoftext|>",)),
    InfillFormat(("▁<PRE>", PREFIX, "▁<SUF>", SUFFIX, "▁<MID>"), ("▁<EOT>",), bare=True),
    InfillFormat(("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>")),
    InfillFormat(("<[fim-suffix]>", SUFFIX, "<[fim-prefix]>", PREFIX, "<[fim-middle]>")),
    InfillFormat(("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX)),
)


class InfillTokens(NamedTuple):
    """The infill format of a model, with the ids of its tokens.

    end_tokens: tokens that end the infill
    tokens: ids by token name
    mark: the tokens of MARK
    begin: the tokens that the tokenizer adds before a text
    """

    format: InfillFormat
    end_tokens: tuple[int, ...]
    tokens: dict[str, int]
    mark: tuple[int, ...]
    begin: tuple[int, ...]

    def prompt(self, prefix: Sequence[int], marked_suffix: Sequence[int]) -> list[int]:
        """Return the prompt as token ids.

        marked_suffix: the tokens of MARK and the suffix
        """
        texts = {PREFIX: prefix, SUFFIX: marked_suffix[len(self.mark) :]}
        parts = [texts[part] if part in texts else [self.tokens[part]] for part in self.format.parts]
        return [*self.begin, *(token for part in parts for token in part)]


class InfillPrompts(NamedTuple):
    """The infill prompts of a request, as texts or token ids, and the tokens that end a completion."""

    prompts: Sequence[str | list[int]]
    end_tokens: tuple[int, ...]


class Infill:
    """Writes the infill prompts of one model.

    is_probed: True once the tokenizer was asked whether the model has a format
    """

    def __init__(self, acquire: AcquireRun) -> None:
        self._acquire = acquire
        self._tokens_of_format: InfillTokens | None = None
        self.is_probed = False

    async def format(self, client: str) -> InfillTokens:
        """Return the model's format. Raises ApiError if it has none.

        client: the client that the calls of the tokenizer count for in the fair queue
        """
        if not self.is_probed:
            self._tokens_of_format, self.is_probed = await self._find(client), True
        if self._tokens_of_format is None:
            message = "suffix: the model that is served has no tokens for filling a gap; it can only continue a text"
            raise ApiError(400, "unsupported_parameter", message, param="suffix")
        return self._tokens_of_format

    async def prompts(self, prefixes: Sequence[str], suffix: str, client: str) -> InfillPrompts:
        """Return a prompt for each prefix, with the same suffix. Raises ApiError as `format`."""
        infill = await self.format(client)
        if not infill.format.bare:
            return InfillPrompts([infill.format.prompt(prefix, suffix) for prefix in prefixes], infill.end_tokens)
        *prefix_tokens, marked_suffix = await self._tokens([*prefixes, MARK + suffix], client)
        return InfillPrompts([infill.prompt(prefix, marked_suffix) for prefix in prefix_tokens], infill.end_tokens)

    async def _find(self, client: str) -> InfillTokens | None:
        names = list(dict.fromkeys(name for format in INFILL_FORMATS for name in (*format.names, *format.ends)))
        mark, *encoded_names = await self._tokens([MARK, *names], client)
        tokens = {name: ids[0] for name, ids in zip(names, encoded_names, strict=True) if len(ids) == 1}
        for format in INFILL_FORMATS:
            if all(name in tokens for name in format.names):
                ends = (*format.ends, *format.names)  # a model that generates one of these repeats the prompt
                (framed,) = await self._tokens([format.names[0]], client, frame=True)
                begin = framed[: framed.index(tokens[format.names[0]])]
                return InfillTokens(format, tuple(tokens[name] for name in ends if name in tokens), tokens, mark, begin)
        return None

    async def _tokens(self, texts: Sequence[str], client: str, *, frame: bool = False) -> list[tuple[int, ...]]:
        requests = [Tokenize(request=new_request_id(), text=text, frame=frame) for text in texts]
        async with self._acquire() as coordinator:
            return [answer.tokens for answer in await tokenize_all(coordinator, requests, client)]


class InfillResponse(GenerationResponse):
    """The response to a request with `suffix`. Its prompts are written once the model has a run, whose tokenizer
    decides the format."""

    def __init__(self, *arguments: Any, infill: Infill, suffix: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._infill, self._suffix = infill, suffix

    async def _complete_body(self, coordinator: CoordinatorClient) -> bytes:
        await self._fill_in_prompts()
        return await super()._complete_body(coordinator)

    async def _stream_body(self, coordinator: CoordinatorClient, stream: EventStream) -> bytes:
        await self._fill_in_prompts()
        return await super()._stream_body(coordinator, stream)

    async def _fill_in_prompts(self) -> None:
        gap = await self._infill.prompts(
            [str(request.prompt) for request in self._requests], self._suffix, self._client
        )
        self._encoder.end_also_with(gap.end_tokens)
        self._requests = [
            _with_prompt(request, prompt, gap.end_tokens)
            for request, prompt in zip(self._requests, gap.prompts, strict=True)
        ]


def _with_prompt(request: Generate, prompt: str | list[int], ends: tuple[int, ...]) -> Generate:
    if isinstance(prompt, str):
        return dataclasses.replace(request, prompt=prompt, stop_tokens=ends)
    return dataclasses.replace(request, prompt=None, tokens=tuple(prompt), stop_tokens=ends)
