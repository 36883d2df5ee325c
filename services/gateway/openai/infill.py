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
from neuronpipe.services.gateway.client.run_client import Coordinator, Hold, new_name, tokenized
from neuronpipe.services.gateway.http.api_errors import Problem
from neuronpipe.services.gateway.openai.response_sending import Answer, Stream

PREFIX, SUFFIX = "{prefix}", "{suffix}"
MARK = "☺"


class Family(NamedTuple):
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


FAMILIES = (
    Family(
        ("<|fim_prefix|>", PREFIX, "<|fim_suffix|>", SUFFIX, "<|fim_middle|>"),
        ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>", "<|endoftext|>"),
    ),
    Family(
        ("<fim_prefix>", PREFIX, "<fim_suffix>", SUFFIX, "<fim_middle>"),
        ("<fim_pad>", "<file_sep>", "<|endoftext|>"),
    ),
    Family(("<fim-prefix>", PREFIX, "<fim-suffix>", SUFFIX, "<fim-middle>"), ("<|endoftext|>",)),
    Family(("▁<PRE>", PREFIX, "▁<SUF>", SUFFIX, "▁<MID>"), ("▁<EOT>",), bare=True),
    Family(("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>")),
    Family(("<[fim-suffix]>", SUFFIX, "<[fim-prefix]>", PREFIX, "<[fim-middle]>")),
    Family(("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX)),
)


class Found(NamedTuple):
    """The family of a model. end_tokens: ids of those tokens that end what fills the gap; tokens: of its names; mark:
    of MARK; begin: what the tokenizer puts before a text."""

    family: Family
    end_tokens: tuple[int, ...]
    tokens: dict[str, int]
    mark: tuple[int, ...]
    begin: tuple[int, ...]

    def prompt(self, prefix: Sequence[int], marked_suffix: Sequence[int]) -> list[int]:
        """What the model continues, of the texts' tokens; those of the suffix stand behind the mark's."""
        texts = {PREFIX: prefix, SUFFIX: marked_suffix[len(self.mark) :]}
        parts = [texts[part] if part in texts else [self.tokens[part]] for part in self.family.parts]
        return [*self.begin, *(token for part in parts for token in part)]


class Gap(NamedTuple):
    """What the model continues, as texts or tokens, and what ends an answer."""

    prompts: Sequence[str | list[int]]
    end_tokens: tuple[int, ...]


class Infill:
    """What the model is shown."""

    def __init__(self, hold: Hold) -> None:
        self._hold = hold
        self._found: Found | None = None
        self._asked = False

    async def family(self, client: str) -> Found:
        """The model's family. client: who asks. Raises Problem when the model fills no gaps."""
        if not self._asked:
            self._found, self._asked = await self._find(client), True
        if self._found is None:
            said = "suffix: the model that is served has no tokens for filling a gap; it only continues texts"
            raise Problem(400, "unsupported_parameter", said, param="suffix")
        return self._found

    async def gap(self, prefixes: Sequence[str], suffix: str, client: str) -> Gap:
        """What the model is shown of a suffix and each of these texts before it. Raises as `family`."""
        found = await self.family(client)
        if not found.family.bare:
            return Gap([found.family.prompt(prefix, suffix) for prefix in prefixes], found.end_tokens)
        *before, marked = await self._tokens([*prefixes, MARK + suffix], client)
        return Gap([found.prompt(prefix, marked) for prefix in before], found.end_tokens)

    async def _find(self, client: str) -> Found | None:
        names = list(dict.fromkeys(name for family in FAMILIES for name in (*family.names, *family.ends)))
        mark, *found = await self._tokens([MARK, *names], client)
        tokens = {name: one[0] for name, one in zip(names, found, strict=True) if len(one) == 1}
        for family in FAMILIES:
            if all(name in tokens for name in family.names):
                ends = (*family.ends, *family.names)  # a model that writes one of these has lost its way
                (framed,) = await self._tokens([family.names[0]], client, frame=True)
                begin = framed[: framed.index(tokens[family.names[0]])]
                return Found(family, tuple(tokens[name] for name in ends if name in tokens), tokens, mark, begin)
        return None

    async def _tokens(self, texts: Sequence[str], client: str, *, frame: bool = False) -> list[tuple[int, ...]]:
        asks = [Tokenize(request=new_name(), text=text, frame=frame) for text in texts]
        async with self._hold() as coordinator:
            return [answer.tokens for answer in await tokenized(coordinator, asks, client)]


class InfillAnswer(Answer):
    """The response to a request with `suffix`: how the model is shown the gap is known once it has a run."""

    def __init__(self, *arguments: Any, infill: Infill, suffix: str, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._infill, self._suffix = infill, suffix

    async def _whole(self, coordinator: Coordinator) -> bytes:
        """Ask with the gap, and make the answer of what comes."""
        await self._show_gap()
        return await super()._whole(coordinator)

    async def _piece_by_piece(self, coordinator: Coordinator, stream: Stream) -> bytes:
        """Ask with the gap, and pass on what comes; returns the last events."""
        await self._show_gap()
        return await super()._piece_by_piece(coordinator, stream)

    async def _show_gap(self) -> None:
        gap = await self._infill.gap([str(ask.prompt) for ask in self._asks], self._suffix, self._client)
        self._form.end_also_with(gap.end_tokens)
        self._asks = [_shown(ask, prompt, gap.end_tokens) for ask, prompt in zip(self._asks, gap.prompts, strict=True)]


def _shown(ask: Generate, prompt: str | list[int], ends: tuple[int, ...]) -> Generate:
    if isinstance(prompt, str):
        return dataclasses.replace(ask, prompt=prompt, stop_tokens=ends)
    return dataclasses.replace(ask, prompt=None, tokens=tuple(prompt), stop_tokens=ends)
