"""Texts with a gap: what models that were trained to fill one are shown, found by the tokens that they have.

The run is asked once which names are one token each; its coordinator has the tokenizer. The order and the blanks of
each family are stated here: nothing in a package tells them.

A family whose prompts no text can spell is shown tokens. CodeLlama learned suffixes without the blank that its
tokenizer puts before every text; as its authors do, we encode a mark with the suffix behind it, and leave the mark's
tokens out.
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
    """How a family of models is shown a gap. parts: names of tokens, and the texts before and after it; ends: tokens
    that such models write after what fills it, besides their end tokens; bare: whether the tokenizer puts a blank
    before a text, and the suffix goes without."""

    parts: tuple[str, ...]
    ends: tuple[str, ...] = ()
    bare: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The tokens without which it is another family."""
        return tuple(part for part in self.parts if part not in (PREFIX, SUFFIX))

    def prompt(self, prefix: str, suffix: str) -> str:
        """What the model continues."""
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
    """The family of a model. end_tokens: ids of those tokens that end what fills the gap; tokens: of its names; mark:
    of MARK; begin: what the tokenizer puts before a text."""

    format: InfillFormat
    end_tokens: tuple[int, ...]
    tokens: dict[str, int]
    mark: tuple[int, ...]
    begin: tuple[int, ...]

    def prompt(self, prefix: Sequence[int], marked_suffix: Sequence[int]) -> list[int]:
        """What the model continues, of the texts' tokens; those of the suffix stand behind the mark's."""
        texts = {PREFIX: prefix, SUFFIX: marked_suffix[len(self.mark) :]}
        parts = [texts[part] if part in texts else [self.tokens[part]] for part in self.format.parts]
        return [*self.begin, *(token for part in parts for token in part)]


class InfillPrompts(NamedTuple):
    """What the model continues, as texts or tokens, and what ends an answer."""

    prompts: Sequence[str | list[int]]
    end_tokens: tuple[int, ...]


class Infill:
    """What the model is shown."""

    def __init__(self, acquire: AcquireRun) -> None:
        self._acquire = acquire
        self._tokens_of_format: InfillTokens | None = None
        self._is_probed = False

    async def format(self, client: str) -> InfillTokens:
        """The model's family. client: who asks. Raises Problem when the model fills no gaps."""
        if not self._is_probed:
            self._tokens_of_format, self._is_probed = await self._find(client), True
        if self._tokens_of_format is None:
            said = "suffix: the model that is served has no tokens for filling a gap; it only continues texts"
            raise ApiError(400, "unsupported_parameter", said, param="suffix")
        return self._tokens_of_format

    async def prompts(self, prefixes: Sequence[str], suffix: str, client: str) -> InfillPrompts:
        """What the model is shown of a suffix and each of these texts before it. Raises as `family`."""
        found = await self.format(client)
        if not found.format.bare:
            return InfillPrompts([found.format.prompt(prefix, suffix) for prefix in prefixes], found.end_tokens)
        *before, marked = await self._tokens([*prefixes, MARK + suffix], client)
        return InfillPrompts([found.prompt(prefix, marked) for prefix in before], found.end_tokens)

    async def _find(self, client: str) -> InfillTokens | None:
        names = list(dict.fromkeys(name for format in INFILL_FORMATS for name in (*format.names, *format.ends)))
        mark, *found = await self._tokens([MARK, *names], client)
        tokens = {name: one[0] for name, one in zip(names, found, strict=True) if len(one) == 1}
        for format in INFILL_FORMATS:
            if all(name in tokens for name in format.names):
                ends = (*format.ends, *format.names)  # a model that writes one of these has lost its way
                (framed,) = await self._tokens([format.names[0]], client, frame=True)
                begin = framed[: framed.index(tokens[format.names[0]])]
                return InfillTokens(format, tuple(tokens[name] for name in ends if name in tokens), tokens, mark, begin)
        return None

    async def _tokens(self, texts: Sequence[str], client: str, *, frame: bool = False) -> list[tuple[int, ...]]:
        requests = [Tokenize(request=new_request_id(), text=text, frame=frame) for text in texts]
        async with self._acquire() as coordinator:
            return [answer.tokens for answer in await tokenize_all(coordinator, requests, client)]


class InfillResponse(GenerationResponse):
    """The response to a request with `suffix`: how the model is shown the gap is known once it has a run."""

    def __init__(self, *arguments: Any, infill: Infill, suffix: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._infill, self._suffix = infill, suffix

    async def _complete_body(self, coordinator: CoordinatorClient) -> bytes:
        """Ask with the gap, and make the answer of what comes."""
        await self._fill_in_prompts()
        return await super()._complete_body(coordinator)

    async def _stream_body(self, coordinator: CoordinatorClient, stream: EventStream) -> bytes:
        """Ask with the gap, and pass on what comes; returns the last events."""
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
