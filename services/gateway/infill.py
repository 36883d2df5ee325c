"""Texts with a gap: what models that were trained to fill one are shown, found by the tokens that they have.

The run is asked once which names are one token each; its coordinator has the tokenizer. The order and the blanks of
each family are stated here: nothing in a package tells them.
"""

from __future__ import annotations

from typing import NamedTuple

from neuronpipe.protocol.messages.request import Tokenize
from neuronpipe.services.gateway.coordinator import Hold, new_name, tokenized
from neuronpipe.services.gateway.problems import Problem

PREFIX, SUFFIX = "{prefix}", "{suffix}"


class Family(NamedTuple):
    """How a family of models is shown a gap. parts: names of tokens, and the texts before and after it; ends: tokens
    that such models write after what fills it, besides their end tokens; blank: whether the tokenizer puts a blank
    before the text after a token."""

    parts: tuple[str, ...]
    ends: tuple[str, ...] = ()
    blank: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """The tokens without which it is another family."""
        return tuple(part for part in self.parts if part not in (PREFIX, SUFFIX))

    def prompt(self, prefix: str, suffix: str) -> str:
        """What the model continues."""
        texts = {PREFIX: prefix, SUFFIX: suffix.removeprefix(" ") if self.blank else suffix}
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
    Family(("▁<PRE>", PREFIX, "▁<SUF>", SUFFIX, "▁<MID>"), ("▁<EOT>",), blank=True),
    Family(("<｜fim▁begin｜>", PREFIX, "<｜fim▁hole｜>", SUFFIX, "<｜fim▁end｜>")),
    Family(("<[fim-suffix]>", SUFFIX, "<[fim-prefix]>", PREFIX, "<[fim-middle]>")),
    Family(("[SUFFIX]", SUFFIX, "[PREFIX]", PREFIX)),
)


class Found(NamedTuple):
    """The family of a model. end_tokens: ids of those tokens that end what fills the gap."""

    family: Family
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

    async def _find(self, client: str) -> Found | None:
        names = list(dict.fromkeys(name for family in FAMILIES for name in (*family.names, *family.ends)))
        asks = [Tokenize(request=new_name(), text=name, frame=False) for name in names]
        async with self._hold() as coordinator:
            answers = await tokenized(coordinator, asks, client)
        single = {name: one.tokens[0] for name, one in zip(names, answers, strict=True) if len(one.tokens) == 1}
        for family in FAMILIES:
            if all(name in single for name in family.names):
                ends = (*family.ends, *family.names)  # a model that writes one of these has lost its way
                return Found(family, tuple(single[name] for name in ends if name in single))
        return None
