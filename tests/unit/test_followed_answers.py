"""Answers that follow grammars by a helper process: the same masks as in this process, and one request's failure."""

from __future__ import annotations

import errno
import json
import math
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.plans.plan.memory_budget import GRAMMAR_TOKEN_BYTES, MAX_HELPER_GROWTH_BYTES, MIN_GRAMMARS_BYTES
from neuronpipe.protocol.messages.request import Calls, Function, Generate, GrammarSyntax
from neuronpipe.services.coordinator.text import constrained_answers as following
from neuronpipe.services.coordinator.text.constrained_answers import ConstrainedAnswer, ConstrainedAnswers
from neuronpipe.services.coordinator.text.grammar import Grammars
from neuronpipe.services.coordinator.text.tokenizer import FileTokenizer

pytest.importorskip("llguidance")
PATH = Path(__file__).parents[2] / "plans/demo/package/tokenizer.json"
VOCABULARY, END = 4096, 0
VOCABULARY_BYTES = GRAMMAR_TOKEN_BYTES * VOCABULARY
PERSON = json.dumps(
    {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}, "required": ["name"]}
)
LONG_S = 30.0


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(FileTokenizer(PATH.read_bytes()), VOCABULARY, [END])


def followed_in(grammars: Grammars, growth_bytes: int) -> Iterator[ConstrainedAnswers]:
    followed = ConstrainedAnswers(grammars, growth_bytes, VOCABULARY_BYTES)
    followed.set_memory(True)
    yield followed
    followed.close()


@pytest.fixture
def answers(grammars: Grammars) -> Iterator[ConstrainedAnswers]:
    """As in a run with the least memory limit."""
    yield from followed_in(grammars, MIN_GRAMMARS_BYTES)


@pytest.fixture
def slow_answers(grammars: Grammars) -> Iterator[ConstrainedAnswers]:
    """With so much memory that the limit of time is reached first."""
    yield from followed_in(grammars, MAX_HELPER_GROWTH_BYTES)


def ask(grammar: str | None, syntax: GrammarSyntax = "json", **more: Any) -> Generate:
    return Generate(request="r", prompt="x", grammar=grammar, grammar_syntax=syntax, **more)


def known(answers: ConstrainedAnswers, *waiting: ConstrainedAnswer) -> None:
    answers.wait(waiting, LONG_S)
    assert not any(one.pending for one in waiting)


def failure(answers: ConstrainedAnswers, asked: Generate) -> tuple[str, str]:
    answer = answers.start(asked)
    known(answers, answer)
    assert answer.failure is not None
    assert "\n" not in answer.failure.message
    assert len(answer.failure.message) < 500
    return answer.failure.code, answer.failure.message


def draw(answer: ConstrainedAnswer, chance: random.Random) -> int:
    bits = int.from_bytes(answer.allowed, "little")
    return chance.choice([token for token in range(VOCABULARY) if bits >> token & 1])


@pytest.mark.parametrize("killed", [False, True])
def test_an_answer_has_the_masks_of_its_grammar_though_the_process_dies(
    answers: ConstrainedAnswers, grammars: Grammars, killed: bool
) -> None:
    answer, direct, chance = answers.start(ask(PERSON)), grammars.start(PERSON), random.Random(5)
    other = answers.start(ask("json"))
    known(answers, answer, other)
    for _ in range(60):
        assert answer.allowed == direct.allowed
        token = draw(answer, chance)
        answer.take(token)
        if killed:
            assert answers.pid is not None
            os.kill(answers.pid, signal.SIGKILL)
        known(answers, answer)
        assert answer.failure is None
        assert answer.complete == direct.take(token)
        if answer.complete:
            break
    else:
        pytest.fail("an object of strings and integers is over before that")


def test_no_process_starts_before_it_has_memory(grammars: Grammars) -> None:
    answers = ConstrainedAnswers(grammars, MIN_GRAMMARS_BYTES, VOCABULARY_BYTES)
    assert not answers.needs_memory
    answer, cancelled = answers.start(ask("json")), answers.start(ask("json"))
    answers.wait([answer], 0.1)
    assert (answer.pending, answers.pid, answers.needs_memory) == (True, None, True)
    answers.set_memory(True)
    known(answers, answer)
    assert answer.failure is None
    answer.close()
    cancelled.close()
    assert answers.needs_memory, "the process has it"
    answers.close()
    assert not answers.needs_memory


def test_an_answer_that_is_refused_needs_no_memory_when_its_process_has_ended(answers: ConstrainedAnswers) -> None:
    assert failure(answers, ask("root ::= nope", "gbnf"))
    assert answers.pid is not None
    os.kill(answers.pid, signal.SIGKILL)
    deadline_s = time.monotonic() + LONG_S
    while answers.needs_memory and time.monotonic() < deadline_s:
        answers.receive()
    assert not answers.needs_memory


def test_calls_are_followed_too(answers: ConstrainedAnswers) -> None:
    calls = Calls(functions=(Function(name="f", arguments="{}"),), before="<c>", between=" ", next="", after="</c>")
    answer = answers.start(ask(None, calls=calls))
    known(answers, answer)
    assert answer.failure is None
    assert answer.allowed.count(0) < len(answer.allowed)


K_PATTERNS = [
    json.dumps({"type": "string", "allOf": [{"pattern": f".*a.{{{n + 5}}}b{n}"} for n in range(k)]}) for k in (20, 60)
]
NESTED = '{"anyOf":[' * 1000 + '{"type":"string"}' + "]}" * 1000
LIMITS = r"takes more than 8 MiB of memory|takes longer than 0.5 s"  # whichever a machine reaches first
# What becomes of each: what the refusal matches, or nothing where it can be followed.
HOSTILE: list[tuple[str, GrammarSyntax, str]] = [
    ("root ::= nope", "gbnf", "nope"),
    ('a ::= "x"', "gbnf", "root"),
    ("# nothing", "gbnf", "root"),
    ("", "gbnf", "root"),
    ("x y z", "lark", "Expected"),
    ("start: nope", "lark", "nope"),
    ("(a{1000}){1000}", "regex", LIMITS),
    ("start: T\nT: /(a{1000}){1000}/", "lark", LIMITS),
    ("(abcdefgh){100000}", "regex", LIMITS),
    ("(abcdefgh){0,100000}", "regex", ""),
    (K_PATTERNS[0], "json", LIMITS),
    (K_PATTERNS[1], "json", LIMITS),
    ('{"type":"string","minLength":1000000}', "json", ""),
    ('{"type":"string","maxLength":1000000}', "json", ""),
    (json.dumps({"enum": [f"v{n}" for n in range(100_000)]}), "json", "longer than"),
    (json.dumps({"enum": [f"v{n}" for n in range(6000)]}), "json", ""),
    (NESTED, "json", "recursion"),
    ("root ::= root", "gbnf", "no text follows"),
    ('root ::= root "a" | "b"', "gbnf", ""),
    ("root ::= " + "(" * 10_000 + '"a"' + ")" * 10_000, "gbnf", "no GBNF"),
    ('root ::= "a"{1000000}', "gbnf", f"^$|{LIMITS}"),  # takes nearly all of that memory
]


@pytest.mark.slow
def test_a_hostile_grammar_is_refused_within_its_limits_or_followed_and_others_go_on(
    answers: ConstrainedAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    bystander, chance = answers.start(ask("json")), random.Random(1)
    known(answers, bystander)
    for grammar, syntax, reason in HOSTILE:
        with monkeypatch.context() as patch:
            patch.setattr(following, "WITHIN_S", 0.5)
            answer = answers.start(ask(grammar, syntax))
            known(answers, answer)
        if not reason:
            assert answer.failure is None, grammar[:60]
        elif answer.failure is None:
            assert re.search(reason, ""), grammar[:60]
        else:
            assert answer.failure.code == "bad_request"
            assert re.search(reason, answer.failure.message), (grammar[:60], answer.failure)
            assert "\n" not in answer.failure.message
        if not bystander.complete:
            bystander.take(draw(bystander, chance))
            known(answers, bystander)
            assert bystander.failure is None


UNREADABLE = {
    "number": '{"type":"integer","minimum":1%s}' % ("0" * 400),
    "infinity": '{"const":1e999}',
    "nesting": '{"not":' * 180 + "{}" + "}" * 180,
    "half a character": json.dumps({"enum": ["\ud800"]}),
    "half a name": json.dumps({"properties": {"\ud800": {}}}),
}


@pytest.mark.parametrize("schema", UNREADABLE.values(), ids=UNREADABLE)
def test_a_schema_that_the_library_cannot_read_is_its_authors_error(answers: ConstrainedAnswers, schema: str) -> None:
    function = Function(name="f", arguments=schema)
    calls = Calls(functions=(function,), before="<c>", between=" ", next="", after="</c>", marker="<c>", text=True)
    for request in (ask(schema), ask(None, calls=calls)):
        code, message = failure(answers, request)
        assert code == "bad_request", message
        assert message.startswith("grammar: ")


def test_a_regex_with_half_a_character_is_its_authors_error(answers: ConstrainedAnswers) -> None:
    assert failure(answers, ask("\ud800", "regex"))[0] == "bad_request"


@pytest.mark.parametrize("text", [True, False], ids=["auto", "required"])
def test_a_function_with_a_hostile_schema_is_refused_within_the_limits(
    answers: ConstrainedAnswers, monkeypatch: pytest.MonkeyPatch, text: bool
) -> None:
    arguments = f'{{"type": "object", "properties": {{"a": {K_PATTERNS[0]}}}, "required": ["a"]}}'
    functions = (Function(name="f", arguments=arguments), Function(name="g", arguments="{}"))
    calls = Calls(functions=functions, before="<c>", between=" ", next="", after="</c>", marker="<c>", text=text)
    monkeypatch.setattr(following, "WITHIN_S", 0.5)
    code, message = failure(answers, ask(None, calls=calls))
    assert code == "bad_request"
    assert re.search(LIMITS, message)


def test_a_grammar_that_takes_too_long_is_refused_and_tokens_go_before_those_that_wait(
    answers: ConstrainedAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    bystander = answers.start(ask(PERSON))
    known(answers, bystander)
    monkeypatch.setattr(following, "WITHIN_S", 0.2)
    slow = [answers.start(ask(K_PATTERNS[0])) for _ in range(5)]
    monkeypatch.setattr(following, "WITHIN_S", LONG_S)
    bystander.take(draw(bystander, random.Random(1)))
    known(answers, bystander)
    assert bystander.failure is None
    assert sum(one.pending for one in slow) >= 4
    known(answers, slow[0])  # where it fills the memory first, it is tried once more, alone
    assert slow[0].failure is not None
    assert re.search("longer than 0.2 s|MiB", slow[0].failure.message)
    for one in slow:
        one.close()


def test_grammars_that_wait_for_too_long_are_refused_at_once_and_later_ones_are_not(
    slow_answers: ConstrainedAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "WITHIN_S", 0.2)
    monkeypatch.setattr(following, "WAITING_S", 0.5)
    began = time.monotonic()
    slow = [slow_answers.start(ask(K_PATTERNS[0])) for _ in range(20)]
    known(slow_answers, *slow)
    assert time.monotonic() - began < 3.0
    codes = [one.failure.code for one in slow if one.failure is not None]
    assert codes[0] == "bad_request"
    assert codes.count("starting") >= 10
    monkeypatch.setattr(following, "WITHIN_S", LONG_S)
    answer = slow_answers.start(ask("json"))
    known(slow_answers, answer)
    assert answer.failure is None


def test_what_the_library_says_of_its_own_failure_is_not_the_clients(
    answers: ConstrainedAnswers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("panic: range start index 18446744073709551615\n  0: std::backtrace")

    monkeypatch.setattr(Grammars, "_matcher", fail)  # the process is forked later
    code, message = failure(answers, ask("json"))
    assert code == "failed"
    assert "panic" not in message
    assert "range start index" in caplog.text


def test_an_answer_that_nobody_wants_any_more_costs_nothing(answers: ConstrainedAnswers) -> None:
    first = answers.start(ask("json"))
    unwanted = answers.start(ask(K_PATTERNS[0]))
    unwanted.close()
    known(answers, first)
    assert answers.due_s == math.inf, "nothing else is under way"


def test_a_process_that_cannot_be_started_again_is_told_to_those_who_wait(
    answers: ConstrainedAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_more_processes(*_: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    first, second = answers.start(ask("json")), answers.start(ask(PERSON))
    assert answers.pid is not None
    os.kill(answers.pid, signal.SIGKILL)
    monkeypatch.setattr("neuronpipe.services.untrusted.helper.fork_process", no_more_processes)
    settled = False
    while second.pending:
        settled |= answers.receive()
    assert settled
    assert first.failure is not None
    assert second.failure is not None
    assert second.failure.code == "failed"
