"""Responses of Ollama's API, whole and as lines, as the ollama client reads them; and what is said about models."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any, cast

import ollama
import pytest
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.models.spec import LayerKind
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.messages.client import Accepted, Finished, Likely, Token
from neuronpipe.services.gateway.answers.answer_format import PLAIN, AnswerFormat
from neuronpipe.services.gateway.http.api_errors import ApiError, unavailable
from neuronpipe.services.gateway.ollama.model_listing import abbreviated, described, listed, running, tag_of, weights_of
from neuronpipe.services.gateway.ollama.ollama_encoding import (
    OllamaChatEncoder,
    OllamaEncoder,
    OllamaGenerateEncoder,
    RequestTimer,
)
from neuronpipe.services.gateway.openai.echo import empty_completion
from neuronpipe.services.gateway.runs.served_models import ServedModel
from neuronpipe.services.gateway.templates.call_format import DEFAULT

from tests.unit.test_gateway_answers import answering
from tests.unit.test_thinking import TAGS

ACCEPTED = Accepted(request="r0", prompt_tokens=7)
CALLS = [("f", '{"a": 1}'), ("g", "{}")]
CALLING = AnswerFormat(calls=DEFAULT)
END = 0
ENCODERS: list[tuple[type[OllamaEncoder], type[Any]]] = [
    (OllamaChatEncoder, ollama.ChatResponse),
    (OllamaGenerateEncoder, ollama.GenerateResponse),
]


class Clock:
    """Nanoseconds that the test sets."""

    def __init__(self) -> None:
        self.now_ns = 1_000

    def __call__(self) -> int:
        return self.now_ns


def encoder(
    kind: type[OllamaEncoder] = OllamaChatEncoder,
    *,
    clock: Clock | None = None,
    answer: AnswerFormat = PLAIN,
    model: str | None = "m:latest",
    logprobs: bool = False,
) -> OllamaEncoder:
    about: dict[str, Any] = {"with_usage": False, "with_logprobs": logprobs, "end_tokens": {END}}
    return kind(model, RequestTimer(clock or Clock()), "m", "np", answer=answer, **about)


def finished(text: str, reason: Any = "end", **more: Any) -> Finished:
    return dataclasses.replace(empty_completion(7), request="r0", text=text, reason=reason, **more)


def tokens_of(text: str, size: int) -> list[Token]:
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    return [Token(request="r0", index=index, token=7, text=piece, ms=2.0) for index, piece in enumerate(pieces)]


def streamed(form: OllamaEncoder, ended: Finished, tokens: list[Token] | None = None) -> list[Any]:
    """Return the objects of a stream. Every line must be one."""
    pieces = b"".join(form.piece(0, token) for token in (tokens_of(ended.text, 2) if tokens is None else tokens))
    stream = (
        form.accepted(0, ACCEPTED) + form.first(0) + pieces + form.last(0, ended) + form.usage_chunk({}) + form.done
    )
    assert stream.endswith(b"\n")
    return [json.loads(line) for line in stream[:-1].split(b"\n")]


def whole(form: OllamaEncoder, ended: Finished) -> Any:
    return json.loads(form.whole([(0, ended)], {}))


def text_of(response: Any) -> str:
    return response["response"] if "response" in response else response["message"]["content"]


@pytest.mark.parametrize(("kind", "known"), ENCODERS)
@pytest.mark.parametrize(
    ("reason", "done_reason"), [("end", "stop"), ("stop", "stop"), ("length", "length"), ("context", "length")]
)
def test_a_text_is_whole_or_in_pieces_and_says_why_it_ends(
    kind: Any, known: Any, reason: Any, done_reason: str
) -> None:
    ended = finished("abc", reason)
    for response in (whole(encoder(kind), ended), *streamed(encoder(kind), ended)):
        read = known.model_validate(response)
        assert read.model == "m:latest"
        assert datetime.fromisoformat(read.created_at).tzinfo is not None
    assert text_of(whole(encoder(kind), ended)) == "abc"
    *pieces, last = streamed(encoder(kind), ended)
    assert [text_of(piece) for piece in pieces] == ["ab", "c"]
    assert [piece["done"] for piece in pieces] == [False, False]
    assert (text_of(last), last["done"], last["done_reason"]) == ("", True, done_reason)
    assert "done_reason" not in pieces[0]


@pytest.mark.parametrize("kind", [OllamaChatEncoder, OllamaGenerateEncoder])
@pytest.mark.parametrize("stream", [True, False])
def test_the_last_object_has_the_measurements_in_nanoseconds(kind: Any, stream: bool) -> None:
    clock = Clock()
    form = encoder(kind, clock=clock)
    clock.now_ns += 500
    form.acquired()
    clock.now_ns += 8_000_000
    ended = finished("abcdef", tokens=3, prefill={"ms": 1.25, "steps": 1.0})
    if stream:
        last = streamed(form, ended)[-1]
    else:
        for token in tokens_of("abcdef", 2):
            form.take(0, token)
        last = whole(form, ended)
    expected = {
        "total_duration": 8_000_500,
        "load_duration": 500,
        "prompt_eval_count": 7,
        "prompt_eval_duration": 1_250_000,
        "eval_count": 3,
        "eval_duration": 4_000_000,  # of the second and third token
    }
    assert expected.items() <= last.items()


def test_the_model_has_the_name_of_the_request() -> None:
    assert whole(encoder(model="m"), finished("abc"))["model"] == "m"
    assert whole(encoder(model=None), finished("abc"))["model"] == "m"


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("before", ["Let me see.", ""])
def test_calls_are_objects_that_come_when_they_are_complete(before: str, size: int) -> None:
    ended = finished(f"{before}\n{DEFAULT.written(CALLS)}")
    message = ollama.ChatResponse.model_validate(whole(encoder(answer=CALLING), ended)).message
    assert message.content == before
    calls = [(call.function.name, call.function.arguments) for call in message.tool_calls or []]
    assert calls == [("f", {"a": 1}), ("g", {})]
    objects = streamed(encoder(answer=CALLING), ended, tokens_of(ended.text, size))
    assert "".join(text_of(response) for response in objects) == before
    sent = [call for response in objects for call in response["message"].get("tool_calls", [])]
    assert [(call["function"]["name"], call["function"]["arguments"]) for call in sent] == calls
    assert [call["function"]["index"] for call in sent] == [0, 1]
    assert len({call["id"] for call in sent}) == 2
    assert objects[-1]["done_reason"] == "stop"


@pytest.mark.parametrize(("kind", "known"), ENCODERS)
@pytest.mark.parametrize("size", [1, 3, 1000])
def test_thinking_is_beside_the_text_whole_and_streamed(kind: Any, known: Any, size: int) -> None:
    ended = finished("<think>\nLet me see.\n</think>\n\nHello")
    thinks = AnswerFormat(thinking=TAGS)
    objects = streamed(encoder(kind, answer=thinks), ended, tokens_of(ended.text, size))
    for responses in ([whole(encoder(kind, answer=thinks), ended)], objects):
        read = [known.model_validate(response) for response in responses]
        parts = [response.message if kind is OllamaChatEncoder else response for response in read]
        assert "".join(part.thinking or "" for part in parts) == "Let me see."
        assert "".join(map(text_of, responses)) == "Hello"
    last = objects[-1]
    assert "thinking" not in last
    assert "thinking" not in last.get("message", {})


def test_a_call_that_is_cut_off_is_left_out() -> None:
    text = DEFAULT.written(CALLS)
    ended = finished(text[: text.rindex("{}") + 1], "length")
    *pieces, last = streamed(encoder(answer=CALLING), ended)
    for responses in ([whole(encoder(answer=CALLING), ended)], [*pieces, last]):
        calls = [call for response in responses for call in response["message"].get("tool_calls", [])]
        assert [call["function"]["name"] for call in calls] == ["f"]
        assert responses[-1]["done_reason"] == "length"
    assert "tool_calls" not in last["message"]


def test_an_object_is_one_line_whatever_the_arguments_are() -> None:
    arguments = '{"a":\n"\u2028\x85ä😀"}'
    ended = finished(DEFAULT.written([("f", arguments)]))
    form = encoder(answer=CALLING)
    line = b"".join(form.piece(0, token) for token in tokens_of(ended.text, 9))
    assert line.decode().splitlines() == [line.decode()[:-1]]
    (call,) = json.loads(line)["message"]["tool_calls"]
    assert call["function"]["arguments"] == json.loads(arguments)


def test_arguments_are_sent_as_the_model_wrote_them() -> None:
    """Parsed and encoded again, the first would be no JSON and the second an error of Python."""
    numbers = f'{{"large": 1e999, "long": {"7" * 5000}}}'
    ended = finished(DEFAULT.written([("f", numbers)]))
    form = encoder(answer=CALLING)
    for body in (
        encoder(answer=CALLING).whole([(0, ended)], {}),
        b"".join(form.piece(0, token) for token in tokens_of(ended.text, 700)),
    ):
        assert f'"arguments": {numbers}'.encode() in body


@pytest.mark.parametrize(("kind", "known"), ENCODERS)
def test_log_probabilities_are_those_of_all_tokens_but_the_end(kind: Any, known: Any) -> None:
    top = (Likely(token=8, piece=b"x", logprob=-0.5),)
    tokens = [
        Token(request="r0", index=0, token=7, text="", ms=1.0, logprob=-1.5, piece=b"\xc3", top=top),
        Token(request="r0", index=1, token=9, text="ä", ms=1.0, logprob=-2.5, piece=b"\xa4"),
        Token(request="r0", index=2, token=END, text="", ms=1.0, logprob=-0.1, piece=b"</s>"),
    ]
    form = encoder(kind, logprobs=True)
    for token in tokens:
        form.take(0, token)
    ended = finished("ä")
    objects = streamed(encoder(kind, logprobs=True), ended, tokens)
    for responses in ([whole(form, ended)], objects):
        rated = [entry for response in responses for entry in known.model_validate(response).logprobs or []]
        assert [entry.logprob for entry in rated] == [-1.5, -2.5]
        assert [entry.token for entry in rated[0].top_logprobs] == ["x", "�"]
    assert "".join(map(text_of, objects)) == "ä"
    assert "logprobs" not in objects[-1]


def test_an_error_in_a_stream_is_its_last_object() -> None:
    line = encoder().error_chunk(ApiError(503, "draining", "it ends"))
    assert line.endswith(b"\n")
    assert json.loads(line) == {"error": "it ends"}


def test_spaces_keep_a_stream_alive_and_its_type_is_ndjson(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronpipe.services.gateway.openai.response_sending.COMMENT_S", 0.02)

    async def scene() -> None:
        async with answering(form=encoder()) as (played, task):
            await played.shown(b" ", 2)
            played.say(ACCEPTED, *tokens_of("ab", 1), finished("ab"))
            await task
            assert dict(played.sent[0]["headers"])[b"content-type"] == b"application/x-ndjson"
            assert played.body.startswith(b"  ")
            objects = [json.loads(line) for line in played.body.splitlines()]
            assert "".join(map(text_of, objects)) == "ab"
            assert [response["done"] for response in objects] == [False] * (len(objects) - 1) + [True]
            assert objects[-1]["total_duration"] == objects[-1]["load_duration"] == 0

    asyncio.run(scene())


def test_a_stream_whose_run_cannot_start_ends_with_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuronpipe.services.gateway.openai.response_sending.RUN_READY_S", 0.02)

    async def scene() -> None:
        run = asyncio.get_running_loop().create_future()
        async with answering(run=run, form=encoder()) as (played, task):
            await played.shown(b" ")
            run.set_exception(unavailable("restarting", "it does not begin"))
            await task
            assert json.loads(played.body) == {"error": "it does not begin"}

    asyncio.run(scene())


# ---- about models --------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def model() -> ServedModel:
    memory = SimpleNamespace(total_bytes=lambda: 123, accelerator_bytes=23)
    plan = SimpleNamespace(compute=SimpleNamespace(context_tokens=512, sequences=2), memory=memory)
    return ServedModel(Package.open(DEMO), cast(Any, plan))


def test_a_model_is_listed_as_the_client_reads_it(model: ServedModel) -> None:
    (entry,) = ollama.ListResponse.model_validate({"models": [listed(model)]}).models
    assert entry.model == "neuronpipe-demo:latest"
    assert entry.size == sum(file.stat().st_size for file in DEMO.iterdir() if file.name != "manifest.json")
    assert entry.digest == model.package.manifest.id
    assert entry.modified_at == datetime.fromtimestamp((DEMO / "manifest.json").stat().st_mtime, UTC)
    assert entry.details is not None
    assert (entry.details.family, entry.details.quantization_level) == ("llama", "Q8")


def test_a_run_is_listed_with_its_memory_and_its_end(model: ServedModel) -> None:
    (entry,) = ollama.ProcessResponse.model_validate({"models": [running(model, 60.0)]}).models
    assert (entry.name, entry.size, entry.size_vram, entry.context_length) == ("neuronpipe-demo:latest", 123, 23, 512)
    assert entry.expires_at is not None
    left = entry.expires_at - datetime.now(UTC)
    assert timedelta(seconds=30) < left <= timedelta(seconds=60)
    (entry,) = ollama.ProcessResponse.model_validate({"models": [running(model, math.inf)]}).models
    assert entry.expires_at is not None
    assert entry.expires_at - datetime.now(UTC) > timedelta(days=365 * 100)


def test_a_model_is_described_with_its_context_and_capabilities(model: ServedModel) -> None:
    for fills_gaps in (False, True):
        facts = ollama.ShowResponse.model_validate(described(model, fills_gaps=fills_gaps))
        assert facts.modelinfo is not None
        family = facts.modelinfo["general.architecture"]
        assert facts.modelinfo[f"{family}.context_length"] == 512
        assert facts.parameters == "num_ctx 512"
        assert facts.capabilities == ["completion", "tools"] + ["insert"] * fills_gaps


@pytest.mark.parametrize(("experts", "published"), [(1, 7_241_732_096), (8, 46_702_792_704)])
def test_weights_are_as_many_as_are_published_of_mistral_and_mixtral(
    model: ServedModel, experts: int, published: int
) -> None:
    """Norms and routers are not counted."""
    width, layers = 4096, 32
    shape = {"width": width, "neurons": 14336, "query_heads": 32, "key_heads": 8, "head_width": 128}
    shape |= {"vocabulary": 32000, "tied_embeddings": False, "experts": experts, "experts_per_token": min(experts, 2)}
    kinds = (LayerKind(layers=layers),)
    spec = dataclasses.replace(model.package.manifest.model, layer_kinds=kinds, **cast(Any, shape))
    norms, routers = width * (2 * layers + 1), layers * width * (experts if experts > 1 else 0)
    assert weights_of(spec) == published - norms - routers


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0"), (7, "7.00"), (999, "999"), (11_141_120, "11.1M"), (7_615_616_512, "7.62B"), (1.2e12, "1.20T")],
)
def test_numbers_are_abbreviated_to_three_digits(number: int, text: str) -> None:
    assert abbreviated(number) == text


def test_a_name_without_a_tag_gets_one() -> None:
    assert (tag_of("m"), tag_of("m:7b")) == ("m:latest", "m:7b")
