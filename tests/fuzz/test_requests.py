"""Whatever a client asks for that the wire carries, the coordinator answers it to the end or refuses it in one line."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from neuronpipe.launch.planning import DEMO
from neuronpipe.protocol.codec import Message
from neuronpipe.protocol.messages.client import Finished, Refused
from neuronpipe.protocol.messages.request import SAMPLING_OPTIONS, Bias, Calls, Function, Generate
from neuronpipe.protocol.options import Option
from neuronpipe.services.coordinator.sampling import Sampler
from neuronpipe.services.coordinator.scheduling.admission import Limits
from neuronpipe.services.coordinator.scheduling.events import (
    Action,
    ProcessReady,
    RequestReceived,
    SampleTokens,
    SendStep,
    StepLeft,
    Tell,
    TokensSampled,
)
from neuronpipe.services.coordinator.scheduling.scheduler import Scheduler
from neuronpipe.services.coordinator.text.grammar import Grammars
from neuronpipe.services.coordinator.text.tokenizer import FileTokenizer

from tests.direct_constraints import DirectConstraints
from tests.fuzz.test_wire import documents

VOCABULARY, END = 4096, 0
PROCESSES = [("decode", 0), ("prefill", 0)]
CONTENT = (Path(DEMO) / "tokenizer.json").read_bytes()
LOGITS = np.random.default_rng(7).normal(0, 4, VOCABULARY).astype(np.float32)
LOGITS[5:9] = math.inf, -math.inf, 0.0, -0.0
SAMPLER = Sampler(memoryview(LOGITS).cast("B").cast("f"), VOCABULARY)
TOKENIZER = FileTokenizer(CONTENT)
CONSTRAINTS = DirectConstraints(Grammars(TOKENIZER, VOCABULARY, [END]))

any_float = st.floats() | st.sampled_from([0.0, 0.5, 1.0, 2.0, -1.0, 1e-300, 1e38])
any_int = st.integers(-(2**63), 2**64 - 1) | st.integers(0, 30)
schemas = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["object", "string", "integer", "array", "number", "boolean", "null", "thing"]),
        "properties": st.dictionaries(st.text(max_size=3), st.just({"type": "integer"}), max_size=2),
        "required": st.lists(st.text(max_size=3), max_size=2),
        "items": st.just({"enum": [1, "two", None]}),
        "minItems": any_int,
        "maxLength": any_int,
        "pattern": st.text(max_size=6),
        "additionalProperties": st.booleans(),
        "maximum": any_float.filter(math.isfinite),
    },
)
grammars = st.none() | st.sampled_from(["json", "", "{"]) | st.text() | (schemas | documents).map(json.dumps)


@st.composite
def calls(draw: st.DrawFn) -> Calls:
    """Functions with schemas of all kinds, and any text round them."""
    before = draw(st.sampled_from(['<call>{"name": "', "<|endoftext|>[", "/x", "\0", "]"]) | st.text(min_size=1))
    names = st.sampled_from(["f", "ff"]) | st.text(max_size=3)
    arguments = (schemas | documents).map(json.dumps) | st.text(max_size=3)
    functions = st.builds(Function, name=names, arguments=arguments, strict=st.booleans())
    return Calls(
        functions=tuple(draw(st.lists(functions, min_size=1, max_size=2))),
        before=before,
        between=draw(st.text(min_size=1, max_size=4)),
        next=draw(st.sampled_from(["}{", "\0"]) | st.text(min_size=1)),
        after=draw(st.text(max_size=3)),
        marker=before[: draw(st.integers(0, len(before)))],
        text=draw(st.booleans()),
        most=draw(st.integers(1, 3)),
    )


anything = {
    "request": st.text(max_size=4),
    "prompt": st.text(min_size=1, max_size=6),
    "max_tokens": st.integers(-1, 6),
    **{option.name: {float: any_float, int: any_int, bool: st.booleans()}[option.kind] for option in SAMPLING_OPTIONS},
    "logit_bias": st.lists(st.builds(Bias, token=any_int, bias=any_float), max_size=3).map(tuple),
    "grammar": grammars,
    "calls": calls(),
    "logprobs": st.none() | any_int,
    "seed": any_int,
    "stop": st.lists(st.text(max_size=2), max_size=2).map(tuple),
}


def allowed(option: Option) -> st.SearchStrategy[float]:
    """Values of an option's whole range; often its default."""
    if option.range is None:
        return st.booleans()
    least, most, above = option.range.minimum, option.range.maximum, option.range.exclusive
    inside = st.floats(least, most, exclude_min=above) if option.kind is float else st.integers(int(least), int(most))
    return st.just(option.default) | inside


plain = {
    **{option.name: allowed(option) for option in SAMPLING_OPTIONS},
    "logprobs": st.none() | st.integers(0, 20),
    "grammar": st.none() | schemas.map(json.dumps),
    "calls": st.none() | calls(),
}
servable = st.builds(
    Generate, request=st.just("r"), prompt=st.just("x ="), max_tokens=st.integers(1, 6), seed=any_int, **plain
)


@st.composite
def requests(draw: st.DrawFn) -> Generate:
    """A request that can be served, but for a few fields that hold anything."""
    names = draw(st.lists(st.sampled_from(sorted(anything)), max_size=3, unique=True))
    return dataclasses.replace(draw(servable), **{name: draw(anything[name]) for name in names})


def answers(ask: Generate) -> list[Message]:
    """What the client hears."""
    limits = Limits(
        mode="exact",
        sequences=1,
        context_tokens=32,
        prefill_chunk_tokens=16,
        logit_rows=1,
        vocabulary=VOCABULARY,
        end_tokens=frozenset({END}),
        plan_id="p",
    )
    scheduler = Scheduler(limits, PROCESSES, TOKENIZER, CONSTRAINTS)
    for process in PROCESSES:
        scheduler.handle(ProcessReady(process), 0.0)
    pending: list[Action] = scheduler.handle(RequestReceived(b"c", ask), 0.0)
    heard: list[Message] = []
    while pending:
        action: Any = pending.pop(0)
        if isinstance(action, Tell):
            heard.append(action.message)
        elif isinstance(action, SendStep):
            for process in action.processes:
                pending += scheduler.handle(StepLeft(process, action.message.step, action.message.epoch, True), 1.0)
        elif isinstance(action, SampleTokens):
            tokens, logprobs = SAMPLER.sample_all(action.rows)
            pending += scheduler.handle(TokensSampled(tokens, {}, logprobs), 2.0)
    assert not scheduler.requests.active
    assert not scheduler.requests.queued
    return heard


def ended_well(heard: list[Message]) -> bool:
    assert isinstance(heard[-1], Finished | Refused)
    assert not any(isinstance(message, Finished | Refused) for message in heard[:-1])
    if isinstance(heard[-1], Refused):
        assert heard[-1].code in ("bad_request", "too_long")
        assert "\n" not in heard[-1].message
    return isinstance(heard[-1], Finished)


@given(requests())
def test_any_request_is_answered_or_refused(ask: Generate) -> None:
    ended_well(answers(ask))


@given(servable)
def test_a_request_within_the_ranges_is_refused_for_its_schema_alone(ask: Generate) -> None:
    heard = answers(ask)
    if not ended_well(heard):
        assert ask.grammar is not None or ask.calls is not None
        assert heard[-1].message.startswith("grammar: ")  # type: ignore[attr-defined]
