"""Chat templates that take time or memory without end fail alone, at the limits of their helper process."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from neuronpipe.plans.plan.memory_budget import MIN_TEMPLATES_BYTES
from neuronpipe.services.gateway.templates.messages import ChatTurn
from neuronpipe.services.gateway.templates.template_jobs import (
    JOB_S,
    WORK,
    PromptJob,
    TemplateError,
    TemplateReport,
    TemplateSource,
    WrittenPrompt,
    report_job,
)
from neuronpipe.services.gateway.templates.template_process import prepare
from neuronpipe.services.untrusted.helper import Helper, UntrustedError

LIMIT_S = 0.25
GOOD = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
DOUBLED_LIST = "{% set n = namespace(l=[0]) %}{% for i in range(64) %}{% set n.l = [n.l, n.l] %}{% endfor %}"
OTHER_LIST = "{% set k = namespace(l=[0]) %}{% for i in range(64) %}{% set k.l = [k.l, k.l] %}{% endfor %}"
LONG_TEXT = "{% set t = 'ab' * 4194304 %}"
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}"
ENDS = "{% endfor %}{% endfor %}{% endfor %}"
HOSTILE = {
    "power": "{{ 7 ** (7 ** 9) }}",
    "power in a condition": "{% if 3 ** (10 ** 8) == 1 %}{% endif %}",
    "power of powers": "{{ (9 ** 999999) ** 99 % 7 }}",
    "power by squaring": "{% set n = namespace(x=3) %}{% for i in range(40) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "shift by product": "{{ 10 ** 3000000 * 10 ** 3000000 // 3 ** 5000000 }}",
    "number as text": "{{ (10 ** 999999) | string | length }}",
    "round to digits": "{{ 1 | round(400000000, 'floor') }}",
    "round up to digits": "{{ 1.5 | round(90000000, 'ceil') }}",
    "round a large number": "{{ (3 ** 2000000) | round(300000000, 'floor') }}",
    "doubled lists compared": DOUBLED_LIST + OTHER_LIST + "{{ n.l == k.l }}",
    "doubled lists ordered": DOUBLED_LIST + OTHER_LIST + "{{ n.l < k.l }}",
    "doubled list printed": DOUBLED_LIST + "{{ n.l }}",
    "doubled list as JSON": DOUBLED_LIST + "{{ n.l | tojson }}",
    "doubled list counted": DOUBLED_LIST + OTHER_LIST + "{{ [k.l].count(n.l) }}",
    "doubled list looked up": DOUBLED_LIST + OTHER_LIST + "{{ n.l in [k.l, k.l] }}",
    "doubled list unique": DOUBLED_LIST + OTHER_LIST + "{{ [n.l, k.l] | sort }}",
    "doubled dictionary": DOUBLED_LIST.replace("[n.l, n.l]", "{'a': n.l, 'b': n.l}") + "{{ n.l | pprint }}",
    "method of a long text": LONG_TEXT + "{% for i in range(9999) %}{{ t.count('ba' * 64) }}{% endfor %}",
    "replacing in a long text": LONG_TEXT + "{{ t.replace('a', t) }}",
    "splitting a long text": LONG_TEXT + "{% for i in range(99) %}{% set p = t.split('a') %}{% endfor %}",
    "translating a long text": LONG_TEXT + "{% for i in range(9999) %}{% set p = t.title().swapcase() %}{% endfor %}",
    "words of a long text": LONG_TEXT + "{% for i in range(999) %}{{ t | wordcount }}{% endfor %}",
    "padding a text": "{{ 'x'.ljust(10 ** 12) }}",
    "filling a text": "{{ '7'.zfill(10 ** 10) }}",
    "centring a text": "{{ 'x' | center(10 ** 10) }}",
    "expanding tabs": "{{ '\\t'.expandtabs(2000000000) }}",
    "formatting to a width": "{{ '%999999999d' % 1 }}",
    "formatting with braces": "{{ '{:999999999}'.format(1) }}",
    "indenting": "{{ 'a\nb' | indent(999999999) }}",
    "indented JSON": "{{ messages | tojson(indent=999999999) }}",
    "joined by a long text": LONG_TEXT + "{{ range(99999) | join(t) }}",
    "repeated text": "{{ 'x' * 10 ** 12 }}",
    "doubled text": "{% set n = namespace(x='x') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "wrapped text": LONG_TEXT + "{{ t | wordwrap(1) | length }}",
    "links in a text": "{{ ('http://' ~ 'a.' * 400000) | urlize }}",
    "empty loops": LOOPS + ENDS,
    "loop over a product": "{% for i in range(99999) %}{{ range(99999) | list | length }}{% endfor %}",
    "sums": "{% for i in range(99999) %}{% set x = range(99999) | sum %}{% endfor %}",
    "batches": "{{ range(99999) | batch(2 ** 40, 0) | list | length }}",
    "slices": "{{ range(9) | slice(99999999) | list | length }}",
    "lorem ipsum": "{{ lipsum(n=99999, min=9999, max=99999) }}",
    "recursion by macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(99) }}",
    "nesting in the template": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "many branches": "{% if a %}" * 3000 + "{% endif %}" * 3000,
    "a long sum of constants": "{{ " + " + ".join(["9 ** 999999999"] * 9) + " }}",
}


@pytest.fixture(scope="module")
def helper() -> Iterator[Helper]:
    """As the gateway's, but a fork, which starts at once."""
    forked = Helper(prepare, memory_bytes=MIN_TEMPLATES_BYTES)
    yield forked
    forked.dispose()


def job(text: str) -> bytes:
    return PromptJob(source=TemplateSource(text, "<s>", "</s>"), turns=[ChatTurn("user", "Hi")]).encoded()


@pytest.mark.parametrize("text", HOSTILE.values(), ids=list(HOSTILE))
def test_a_hostile_template_ends_at_the_limits_and_a_good_one_is_written_after_it(helper: Helper, text: str) -> None:
    began = time.monotonic()
    with pytest.raises((UntrustedError, TemplateError)):
        WrittenPrompt.decoded(helper.call(job(text), LIMIT_S))
    assert time.monotonic() - began < 10 * LIMIT_S
    assert WrittenPrompt.decoded(helper.call(job(GOOD), 20)).text == "[user]Hi"


@pytest.mark.parametrize(
    ("text", "reason", "limit"),
    [
        ("{{ 7 ** (7 ** 9) }}", "time", "0.25 s"),
        ("{{ 'x' * 10 ** 9 }}", "memory", "24 MiB"),
        (LOOPS + ENDS, "time", "s"),
    ],
)
def test_the_error_names_the_limit(helper: Helper, text: str, reason: str, limit: str) -> None:
    with pytest.raises(UntrustedError, match=limit) as caught:
        helper.call(job(text), LIMIT_S)
    assert caught.value.reason == reason


def test_a_template_that_is_only_hostile_to_tools_is_reported(helper: Helper) -> None:
    text = GOOD + "{% if tools %}{{ tools.no_such.thing }}{% endif %}"
    report = TemplateReport.decoded(helper.call(report_job(TemplateSource(text, "", "")), JOB_S))
    assert report.error is None
    assert report.tools_fail
    assert report.why_not is not None
    assert report.why_not.startswith("it fails with functions: line 1: ")


def test_the_program_that_a_gateway_starts_answers() -> None:
    program = Helper(WORK, memory_bytes=MIN_TEMPLATES_BYTES)
    try:
        assert WrittenPrompt.decoded(program.call(job(GOOD), 20)).text == "[user]Hi"
        turns = [ChatTurn("user", "\ud800 ä \0 😀" * 1000)] * 100
        long = PromptJob(source=TemplateSource(GOOD, "", ""), turns=turns).encoded()
        assert WrittenPrompt.decoded(program.call(long, 20)).text.startswith("[user]\ud800 ä \0 😀")
        with pytest.raises(TemplateError, match=r"^line 1: .*unknown tag"):
            WrittenPrompt.decoded(program.call(job("{% nothing %}"), 20))
    finally:
        program.dispose()
