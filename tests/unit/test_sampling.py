"""Sampling tokens, against a plain reference in numpy: every option alone, and all of them together."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from neuronpipe.native import lib
from neuronpipe.protocol.messages.request import Generate
from neuronpipe.services.coordinator.sampling import Sampler
from neuronpipe.services.coordinator.scheduling.events import SampleRow, TokensSampled

VOCABULARY = 50
PROMPT = (3, 3, 7, 11)
ANSWER = (7, 20, 20, 20, 41)


def sampler_of(*rows: np.ndarray) -> Sampler:
    return Sampler(memoryview(np.stack(rows).astype(np.float32)).cast("B").cast("f"), VOCABULARY)


def logits_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, VOCABULARY).astype(np.float32)


def row_of(row: int = 0, counter: int = 0, **options: Any) -> SampleRow:
    extra = {name: options.pop(name) for name in ("text", "prompt_tokens", "biases", "allowed") if name in options}
    return SampleRow(row, Generate(request="r", prompt="", **options), counter, **extra)


def changed(logits: np.ndarray, how: SampleRow) -> np.ndarray:
    """The logits that a token is sampled from, token by token."""
    ask, out = how.ask, logits.astype(np.float64)
    considered = range(len(how.text))[-ask.penalty_tokens :]
    text = [how.text[at] for at in considered]
    generated = [how.text[at] for at in considered if at >= how.prompt_tokens]
    for token in range(VOCABULARY):
        if token in text:
            out[token] = out[token] / ask.repetition_penalty if out[token] > 0 else out[token] * ask.repetition_penalty
        out[token] -= ask.frequency_penalty * generated.count(token) + ask.presence_penalty * (token in generated)
    for token, bias in how.biases:
        out[token] += bias
    if how.allowed is not None:
        bits = np.unpackbits(np.frombuffer(how.allowed, np.uint8), bitorder="little")[:VOCABULARY]
        out[bits == 0] = -math.inf
    return out


def probabilities(logits: np.ndarray, how: SampleRow) -> np.ndarray:
    """What sampling makes of them: zero for what may not be sampled."""
    ask, out = how.ask, changed(logits, how)
    order = sorted(range(VOCABULARY), key=lambda token: (-out[token], token))
    weight = np.exp((out - out.max()) / ask.temperature)
    kept = order[: ask.top_k or VOCABULARY]
    total = weight[kept].sum()
    count = next(n for n in range(1, len(kept) + 1) if n == len(kept) or weight[kept[:n]].sum() >= ask.top_p * total)
    kept = [token for token in kept[:count] if weight[token] >= ask.min_p]
    chances = np.zeros(VOCABULARY)
    chances[kept] = weight[kept] / weight[kept].sum()
    return chances


OPTIONS = {
    "min_p": {"min_p": 0.1},
    "min_p with top_k and top_p": {"min_p": 0.05, "top_k": 20, "top_p": 0.9},
    "min_p with top_k": {"min_p": 0.2, "top_k": 9},
    "repetition": {"repetition_penalty": 1.7, "text": PROMPT + ANSWER, "prompt_tokens": 4},
    "frequency": {"frequency_penalty": 0.8, "text": PROMPT + ANSWER, "prompt_tokens": 4},
    "presence": {"presence_penalty": -1.5, "text": PROMPT + ANSWER, "prompt_tokens": 4},
    "the last tokens": {
        "repetition_penalty": 1.7,
        "frequency_penalty": 0.8,
        "penalty_tokens": len(ANSWER) + 2,
        "text": PROMPT + ANSWER,
        "prompt_tokens": 4,
    },
    "fewer than answered": {"presence_penalty": 2.5, "penalty_tokens": 2, "text": PROMPT + ANSWER, "prompt_tokens": 4},
    "more than there are": {"presence_penalty": 2.5, "penalty_tokens": 99, "text": PROMPT + ANSWER, "prompt_tokens": 4},
    "bias": {"biases": ((0, 4.0), (20, -2.5), (21, -math.inf))},
    "allowed": {"allowed": bytes([0xFF, 0x81, 0, 0x10, 0, 0xFF, 0x03])},
    "all": {
        "min_p": 0.02,
        "top_k": 30,
        "top_p": 0.97,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.5,
        "text": PROMPT + ANSWER,
        "prompt_tokens": 4,
        "biases": ((0, 2.0), (41, -math.inf)),
        "allowed": bytes([0xFF, 0xFF, 0x7F, 0xFF, 0xFE, 0xFF, 0x03]),
    },
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tokens_are_sampled_as_often_as_the_reference_says(options: dict[str, Any]) -> None:
    samples = 4000
    for temperature in (0.7, 2.0):
        logits = logits_of(1)
        sampler = sampler_of(logits)
        how = row_of(temperature=temperature, seed=5, **options)
        chances = probabilities(logits, how)
        tokens = [sampler.sample(dataclasses.replace(how, counter=n)) for n in range(samples)]
        counts = np.bincount(tokens, minlength=VOCABULARY)
        assert not counts[chances == 0].any()
        deviation = np.sqrt(samples * chances * (1 - chances)) + 1e-9
        assert (np.abs(counts - samples * chances) <= 5 * deviation + 1).all()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_greedy_takes_the_greatest_after_penalties_biases_and_grammar(options: dict[str, Any]) -> None:
    for seed in range(30):
        logits = logits_of(seed)
        how = row_of(temperature=0.0, **options)
        assert sampler_of(logits).sample(how) == int(changed(logits, how).argmax())


@pytest.mark.parametrize("top_k", [0, 5])
def test_top_p_of_0_takes_the_most_likely_token(top_k: int) -> None:
    for seed in range(30):
        logits = logits_of(seed)
        how = row_of(temperature=5.0, top_p=0.0, top_k=top_k, min_p=0.1, seed=seed)
        assert sampler_of(logits).sample(how) == int(logits.argmax())


@given(st.integers(0, 2**32), st.floats(0.05, 5), st.integers(0, 60), st.floats(0, 1), st.integers(0, 2**64 - 1))
def test_options_that_are_off_change_no_token(
    seed: int, temperature: float, top_k: int, top_p: float, sampling_seed: int
) -> None:
    """The bits of the logits are not touched: a copy that nothing changes gives the token that no copy gives."""
    sampler = sampler_of(logits_of(seed))
    how = row_of(temperature=temperature, top_k=top_k, top_p=top_p, seed=sampling_seed, counter=seed)
    copied = dataclasses.replace(how, biases=((3, 0.0),), allowed=b"\xff" * 7)
    assert sampler.sample(how) == sampler.sample(copied) == sampler.sample(how)


def test_a_row_of_several_is_sampled_alone() -> None:
    rows = [logits_of(n) for n in range(3)]
    together = sampler_of(*rows)
    how = row_of(temperature=1.0, repetition_penalty=1.5, text=(1, 2, 3))
    assert [together.sample(dataclasses.replace(how, row=n)) for n in range(3)] == [
        sampler_of(row).sample(how) for row in rows
    ]


def test_a_row_with_no_token_left_and_one_of_broken_logits_say_so() -> None:
    logits = logits_of(0)
    sampler = sampler_of(logits)
    assert sampler.sample(row_of(allowed=bytes(7))) == TokensSampled.ALL_BANNED
    assert sampler.sample(row_of(allowed=b"\x01" + bytes(6), biases=((0, -math.inf),))) == TokensSampled.ALL_BANNED
    logits[49] = math.nan
    for options in ({}, {"allowed": b"\x01" + bytes(6)}, {"temperature": 1.0, "min_p": 0.5}):
        assert sampler_of(logits).sample(row_of(**options)) == TokensSampled.NOT_A_NUMBER


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_logprobs_are_those_of_the_model_whatever_the_options(count: int) -> None:
    logits = np.round(logits_of(3))  # with equals among them
    how = row_of(temperature=0.3, logprobs=count, biases=((9, 50.0),), top_k=2)
    token = sampler_of(logits).sample(how)
    logprobs = sampler_of(logits).logprobs(how, token)
    logs = logits.astype(np.float64) - np.log(np.exp(logits.astype(np.float64)).sum())
    order = sorted(range(VOCABULARY), key=lambda token: (-logits[token], token))[:count]
    assert token == 9
    assert logprobs.logprob == pytest.approx(logs[9], rel=1e-12)
    assert [token for token, _ in logprobs.top] == order
    assert [logprob for _, logprob in logprobs.top] == pytest.approx(logs[order].tolist(), rel=1e-12)


def test_likelihoods_are_those_of_numpy() -> None:
    rows = [logits_of(n) for n in range(4)]
    targets = (0, 49, 7)
    want = [
        math.log(np.exp(row.astype(np.float64)).sum()) - float(row[t]) for row, t in zip(rows, targets, strict=False)
    ]
    rated = sampler_of(*rows).rate_all(targets, 2)
    assert [-one.logprob for one in rated] == pytest.approx(want, rel=1e-12)
    for row, one in zip(rows, rated, strict=False):
        assert [token for token, _ in one.top] == list(np.argsort(-row, kind="stable")[:2])


def test_the_uniform_number_of_a_seed_and_a_place_is_fixed() -> None:
    assert lib.np_uniform(0, 0) == lib.np_uniform(0, 0) != lib.np_uniform(0, 1) != lib.np_uniform(1, 1)
