"""How tokens are sampled, in real processes: penalties, biases, log probabilities, answers that follow a schema."""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from neuronpipe.launch.client import attach
from neuronpipe.launch.planning import DEMO
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.client import Scored
from neuronpipe.protocol.messages.request import Bias, Generate, Score

from tests.pipeline import PATIENCE_S, Run, Shell, eventually

END = 0
PROMPT = "def area(width, height):"
PEOPLE = json.dumps(
    {
        "type": "array",
        "minItems": 3,
        "maxItems": 3,
        "items": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
            },
            "required": ["name", "age"],
            "additionalProperties": False,
        },
    }
)


@pytest.fixture(scope="module")
def run(long_shell: Shell) -> Iterator[Run]:
    with long_shell.up(DEMO, "--workers", "2", "--sequences", "4") as live:
        yield live


@pytest.fixture(scope="module")
def plain(run: Run) -> dict[str, Any]:
    return run.ask(PROMPT, 24)


def test_options_that_are_off_say_what_no_options_say(run: Run, plain: dict[str, Any]) -> None:
    off = {"min_p": 0.0, "repetition_penalty": 1.0, "logit_bias": (Bias(token=5, bias=0.0),), "logprobs": 0}
    assert run.ask(PROMPT, 24, **off)["token_ids"] == plain["token_ids"]


def test_a_banned_token_is_never_sampled_and_a_favoured_one_always(run: Run, plain: dict[str, Any]) -> None:
    token = plain["token_ids"][0]
    assert token not in run.ask(PROMPT, 24, logit_bias=(Bias(token=token, bias=-100),))["token_ids"]
    assert set(run.ask(PROMPT, 6, logit_bias=(Bias(token=token, bias=100),))["token_ids"]) == {token}


@pytest.mark.parametrize("penalty", ["repetition_penalty", "frequency_penalty", "presence_penalty"])
def test_a_penalty_that_is_high_enough_lets_no_token_come_twice(run: Run, penalty: str) -> None:
    tokens = run.ask(PROMPT, 40, **{penalty: 100.0})["token_ids"]
    assert len(set(tokens)) == len(tokens)


def test_an_end_token_ends_the_text_unless_it_is_to_be_ignored(run: Run) -> None:
    favoured = {"logit_bias": (Bias(token=END, bias=100),)}
    assert run.ask(PROMPT, 5, **favoured)["reason"] == "end"
    going_on = run.ask(PROMPT, 5, **favoured, ignore_end=True)
    assert (going_on["reason"], END in going_on["token_ids"]) == ("length", False)


def test_log_probabilities_are_those_that_scoring_the_text_finds(run: Run) -> None:
    answer = run.ask(PROMPT, 12, temperature=1.0, seed=4, repetition_penalty=1.2, logprobs=3)
    said = [token["logprob"] for token in answer["logprobs"]]
    found: list[float] = []
    with attach(run.path) as client:
        for message in client.request(Score(request="s", text=PROMPT + answer["text"], path="decode")):
            if isinstance(message, Scored):
                found += [-nll for nll in message.nll]
    assert said == pytest.approx(found[-len(said) :], abs=1e-9)
    for token in answer["logprobs"]:
        likely = [other["logprob"] for other in token["top"]]
        assert likely == sorted(likely, reverse=True)
        assert sum(map(math.exp, likely)) <= 1 + 1e-9
    assert "".join(token["text"] for token in answer["logprobs"]) == answer["text"]


def check_people(text: str) -> None:
    people = json.loads(text)
    assert len(people) == 3
    for person in people:
        assert list(person) == ["name", "age"]
        assert (type(person["name"]), type(person["age"])) == (str, int)
        assert len(person["name"]) <= 12
        assert 0 <= person["age"] <= 150


def test_answers_follow_their_schema_each_with_the_tokens_it_gets_alone(run: Run) -> None:
    def ask(seed: int) -> dict[str, Any]:
        return run.ask("people = ", 400, grammar=PEOPLE, temperature=1.0, seed=seed)

    alone = [ask(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as together:
        assert [a["token_ids"] for a in together.map(ask, range(4))] == [a["token_ids"] for a in alone]
    assert len({a["text"] for a in alone}) > 1
    for answer in alone:
        assert answer["reason"] == "end"
        check_people(answer["text"])


def test_the_token_limit_and_stop_texts_end_an_answer_in_a_schema_too(run: Run) -> None:
    whole = run.ask("people = ", 400, grammar=PEOPLE)["text"]
    cut = run.ask("people = ", 5, grammar=PEOPLE)
    assert cut["reason"] == "length"
    assert whole.startswith(cut["text"])
    stopped = run.ask("people = ", 400, grammar=PEOPLE, stop=(",",))
    assert (stopped["reason"], stopped["text"]) == ("stop", whole.partition(",")[0])


@pytest.mark.parametrize("role", ["decode", "coordinator"])
def test_an_answer_in_a_schema_goes_on_with_the_same_tokens_after_a_kill(run: Run, role: str) -> None:
    def ask(**more: Any) -> dict[str, Any]:
        options = {"grammar": PEOPLE, "temperature": 1.0, "seed": 2, "frequency_penalty": 0.1}
        return run.ask("people = ", 400, **options, **more)

    undisturbed = ask()["token_ids"]
    half = threading.Event()
    answer: list[int] = []
    asking = threading.Thread(
        target=lambda: answer.extend(ask(seen=lambda token: half.set() if token.index == 5 else None)["token_ids"])
    )
    pid = run.pid(role)
    asking.start()
    assert half.wait(PATIENCE_S)
    os.kill(pid, signal.SIGKILL)
    asking.join(PATIENCE_S)
    assert answer == undisturbed
    assert eventually(lambda: run.status().ready)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"grammar": '{"type": "person"}'}, "grammar: Invalid type: person"),
        ({"min_p": math.nan}, "min_p is out of range: nan"),
        ({"repetition_penalty": 0.0}, "repetition_penalty is out of range: 0.0"),
        ({"logprobs": 21}, "logprobs is out of range: 21"),
        ({"logit_bias": (Bias(token=4096, bias=1),)}, "token 4096 is outside the vocabulary"),
        ({"logit_bias": 2 * (Bias(token=1, bias=1),)}, "names a token twice"),
        ({"grammar": "json", "logit_bias": tuple(Bias(token=n, bias=-100) for n in range(4096))}, "leave no token"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_sampled_is_refused_in_one_line(run: Run, options: dict[str, Any], reason: str) -> None:
    with attach(run.path) as client, pytest.raises(UserError, match=reason) as caught:
        list(client.request(Generate(request="r", prompt=PROMPT, **options)))
    assert "\n" not in str(caught.value)
    assert run.status().sequences_active == 0


def test_the_command_line_has_the_same_options(run: Run, long_shell: Shell, tmp_path: Any) -> None:
    (tmp_path / "people.json").write_text(PEOPLE, encoding="utf-8")
    where = ("ask", "--run", run.path, "-p", "people = ")
    answer = long_shell.json(*where, "-n", "400", "--json-schema", tmp_path / "people.json", "--logprobs", "2")
    check_people(answer["text"])
    assert [len(token["top"]) for token in answer["logprobs"]] == [2] * answer["tokens"]
    sampled = ("-n", "12", "--temperature", "1", "--seed", "3", "--top-p", "1")
    penalties = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": -0.1}
    options = ["--min-p=0.2", *(f"--{name.replace('_', '-')}={value}" for name, value in penalties.items())]
    said = long_shell.json(*where, *sampled, *options, "--logit-bias", "91=-100", "--ignore-end")["token_ids"]
    bias = {"logit_bias": (Bias(token=91, bias=-100),), "ignore_end": True}
    assert said == run.ask("people = ", 12, temperature=1.0, seed=3, min_p=0.2, **penalties, **bias)["token_ids"]
    for wrong in (("--json-schema", "/nowhere"), ("--logit-bias", "a=1"), ("--logprobs", "1"), ("--min-p", "2")):
        assert wrong[0] in long_shell.refused(*where, *wrong, beside=True)
