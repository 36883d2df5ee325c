"""Texts with a gap: the tokens of a vocabulary say how a model is shown one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from typing import Any, cast

import pytest
from neuronpipe.protocol.messages.client import Accepted, Token, Tokenized
from neuronpipe.protocol.messages.request import Generate, Tokenize
from neuronpipe.services.gateway.client.mailbox import Mailbox
from neuronpipe.services.gateway.client.run_client import CoordinatorClient
from neuronpipe.services.gateway.http.api_errors import ApiError
from neuronpipe.services.gateway.http.metrics import Metrics
from neuronpipe.services.gateway.openai.infill import INFILL_FORMATS, Infill, InfillResponse, InfillTokens
from neuronpipe.services.gateway.openai.response_encoding import CompletionEncoder
from tokenizers import AddedToken, Tokenizer, models, normalizers, processors

from tests.unit.test_gateway_answers import DONE, PATIENCE_S

CODE_LLAMA = ("▁<PRE>", "▁<MID>", "▁<SUF>", "▁<EOT>")


class Run:
    """A run with this tokenizer; without one every character is a token but for those names."""

    def __init__(self, *names: str, tokenizer: Tokenizer | None = None) -> None:
        self.names, self.asked, self._tokenizer = names, 0, tokenizer

    async def generate(self, asks: list[Tokenize], client: str) -> tuple[Mailbox, list[str]]:
        self.asked += 1
        mailbox = Mailbox()
        for number, ask in reversed([*enumerate(asks)]):
            text = ask.text or ""
            if self._tokenizer is not None:
                tokens = tuple(self._tokenizer.encode(text, add_special_tokens=ask.frame).ids)
            else:
                tokens = (self.names.index(text),) if text in self.names else tuple(map(ord, text))
            mailbox.put(number, Tokenized(request=ask.request, tokens=tokens, pieces=(), text=""))
        return mailbox, []

    def cancel(self, names: list[str]) -> None:
        pass


def found(*names: str) -> InfillTokens:
    return asyncio.run(Infill(lambda: nullcontext(cast(CoordinatorClient, Run(*names)))).format("c"))


@pytest.mark.parametrize(
    ("names", "prompt"),
    [
        (
            ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
            "<|fim_prefix|>def f(<|fim_suffix|> ):<|fim_middle|>",
        ),
        (("<fim_prefix>", "<fim_middle>", "<fim_suffix>"), "<fim_prefix>def f(<fim_suffix> ):<fim_middle>"),
        (("<fim-prefix>", "<fim-middle>", "<fim-suffix>"), "<fim-prefix>def f(<fim-suffix> ):<fim-middle>"),
        (("▁<PRE>", "▁<MID>", "▁<SUF>"), "▁<PRE>def f(▁<SUF> ):▁<MID>"),
        (
            ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
            "<｜fim▁begin｜>def f(<｜fim▁hole｜> ):<｜fim▁end｜>",
        ),
        (
            ("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>"),
            "<[fim-suffix]> ):<[fim-prefix]>def f(<[fim-middle]>",
        ),
        (("[PREFIX]", "[SUFFIX]"), "[SUFFIX] ):[PREFIX]def f("),
    ],
    ids=lambda one: one[0] if isinstance(one, tuple) else None,
)
def test_a_family_is_known_by_its_tokens(names: tuple[str, ...], prompt: str) -> None:
    one = found(*names)
    assert one.format.prompt("def f(", " ):") == prompt
    assert sorted(one.end_tokens) == [*range(len(names))]
    for left_out in names:
        with pytest.raises(ApiError, match="no tokens for filling a gap"):
            found(*(name for name in names if name != left_out))


def test_further_tokens_of_the_family_end_the_answer() -> None:
    names = ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|file_sep|>", "<|im_end|>")
    assert sorted(found(*names).end_tokens) == [0, 1, 2, 3]


def test_braces_in_a_text_are_text() -> None:
    for format in INFILL_FORMATS:
        assert "{suffix}" in format.prompt("{suffix}", "x{prefix}")
        assert "x{prefix}" in format.prompt("{suffix}", "x{prefix}")


def test_the_run_is_asked_once() -> None:
    async def twice() -> None:
        run = Run("[PREFIX]", "[SUFFIX]")
        infill = Infill(lambda: nullcontext(cast(CoordinatorClient, run)))
        first = await infill.format("c")
        asked: Any = run.asked
        assert await infill.format("d") == first
        assert run.asked == asked

    asyncio.run(twice())


def code_llama(*characters: str) -> Tokenizer:
    """A tokenizer that works as CodeLlama's: a blank before every text, bytes for what is not among the characters."""
    names = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", *characters, "<s>", "</s>"]
    tokenizer = Tokenizer(models.BPE({name: id for id, name in enumerate(names)}, [], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in CODE_LLAMA])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    begin = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", begin)])
    return tokenizer


@pytest.mark.parametrize("characters", ["☺):", "):"], ids=["with the mark", "with the mark's bytes"])
@pytest.mark.parametrize(
    ("suffix", "shown"), [("):", [")", ":"]), (" ):", ["▁", ")", ":"]), ("  :", ["▁", "▁", ":"]), ("\n", ["<0x0A>"])]
)
def test_code_llama_sees_no_blank_before_a_suffix_that_has_none(characters: str, suffix: str, shown: list[str]) -> None:
    tokenizer = code_llama(*"def", *characters)
    infill = Infill(lambda: nullcontext(cast(CoordinatorClient, Run(tokenizer=tokenizer))))
    gap = asyncio.run(infill.prompts(["def", ""], suffix, "c"))
    names = [[tokenizer.id_to_token(token) for token in prompt] for prompt in cast(list[list[int]], gap.prompts)]
    end = ["▁<SUF>", *shown, "▁<MID>"]
    assert names == [["<s>", "▁<PRE>", "▁", "d", "e", "f", *end], ["<s>", "▁<PRE>", *end]]
    assert {tokenizer.id_to_token(token) for token in gap.end_tokens} == set(CODE_LLAMA)


def test_other_models_are_shown_texts() -> None:
    infill = Infill(lambda: nullcontext(cast(CoordinatorClient, Run("[PREFIX]", "[SUFFIX]"))))
    gap = asyncio.run(infill.prompts(["a", "b"], " c", "client"))
    assert gap.prompts == ["[SUFFIX] c[PREFIX]a", "[SUFFIX] c[PREFIX]b"]


def test_a_gap_is_shown_as_the_model_knows_it_once_its_run_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then a stream has its head and comments."""
    monkeypatch.setattr("neuronpipe.services.gateway.openai.response_sending.RUN_READY_S", 0.01)

    async def scene() -> None:
        live = asyncio.get_running_loop().create_future()
        run, sent, waits = Filling("[PREFIX]", "[SUFFIX]"), list[Any](), asyncio.Event()

        @asynccontextmanager
        async def hold() -> AsyncIterator[CoordinatorClient]:
            await live
            yield cast(CoordinatorClient, run)

        async def send(message: Any) -> None:
            sent.append(message)
            waits.set()

        answer = InfillResponse(
            hold,
            Metrics(),
            CompletionEncoder("m", "f", with_usage=False, with_logprobs=True, end_tokens=()),
            [Generate(request="r0", prompt="def f(")],
            context_tokens=8,
            sequences_per_prompt=1,
            sent_per_prompt=1,
            stream=True,
            infill=Infill(hold),
            suffix="):",
        )
        task = asyncio.ensure_future(cast(Any, answer({}, asyncio.Event().wait, send)))
        await asyncio.wait_for(waits.wait(), PATIENCE_S)
        assert (sent[0]["status"], run.asked) == (200, 0)
        live.set_result(None)
        await asyncio.wait_for(task, PATIENCE_S)
        (ask,) = run.asks
        assert (ask.prompt, sorted(ask.stop_tokens)) == ("[SUFFIX]):[PREFIX]def f(", [0, 1])
        events = b"".join(message.get("body", b"") for message in sent).decode()
        assert '"tokens": ["ab"]' in events
        assert "PREFIX" not in events  # a token that ends the text is not rated

    asyncio.run(scene())


class Filling(Run):
    """A run that fills the gap."""

    async def generate(self, asks: list[Any], client: str) -> tuple[Mailbox, list[str]]:
        if isinstance(asks[0], Tokenize):
            return await super().generate(asks, client)
        self.asks: list[Generate] = asks
        mailbox = Mailbox()
        token = Token(request="r0", index=0, token=7, text="ab", ms=1.0, logprob=-1.0, piece=b"ab")
        end = dataclasses.replace(token, index=1, token=0, text="", piece=b"[PREFIX]")
        for message in (Accepted(request="r0", prompt_tokens=3), token, end, DONE):
            mailbox.put(0, message)
        return mailbox, ["r0"]
