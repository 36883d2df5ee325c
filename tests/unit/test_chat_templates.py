"""Chat templates: what published ones do comes out as in transformers, and what no template should do is refused."""

from __future__ import annotations

import time

import pytest
from neuronpipe.services.gateway.templates.sandbox import Template
from neuronpipe.services.gateway.templates.template_jobs import MAX_PROMPT_BYTES, Refused, TemplateError, TemplateSource

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi <b>"},
    {"role": "assistant", "content": "Hello"},
    {"role": "user", "content": "And?"},
]

CHATML = """{% for message in messages %}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\n' }}
{%- endif %}
"""

LLAMA2 = """{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}
{%- set messages = messages[1:] %}{% endif %}
{%- for message in messages %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {%- if loop.first and system is defined %}
            {%- set text = '<<SYS>>\n' + system + '\n<</SYS>>\n\n' ~ message.content %}
        {%- else %}{% set text = message.content.strip() %}{% endif %}
        {{- bos_token + '[INST] ' + text + ' [/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {%- generation %}{{- ' ' + message['content'] | trim + ' ' + eos_token }}{% endgeneration %}
    {%- endif %}
{%- endfor %}"""


def template(text: str, begin: str = "", end: str = "") -> Template:
    return Template(TemplateSource(text, begin, end))


def test_a_template_of_the_chatml_kind() -> None:
    assert template(CHATML).render(TALK) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b><|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_names_the_begin_and_end_tokens_and_checks_the_order() -> None:
    strict = template(LLAMA2, "<s>", "</s>")
    assert strict.render(TALK) == (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi <b> [/INST] Hello </s><s>[INST] And? [/INST]"
    )
    with pytest.raises(Refused, match="must alternate"):
        strict.render([TALK[1], TALK[1]])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{ {'ä': '<'} | tojson }}", '{"ä": "<"}'),
        ("{{ {'ä': '<'} | tojson(ensure_ascii=True) }}", '{"\\u00e4": "<"}'),
        ("{{ {'ä': '<'} | tojson(ensure_ascii=False) }}", '{"ä": "<"}'),
        ("{{ {'b': 1, 'a': [1, 2]} | tojson(separators=(',', ':')) }}", '{"b":1,"a":[1,2]}'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=True) }}", '{"a": 2, "b": 1}'),
        ("{{ {'b': [1]} | tojson(indent=2) }}", '{\n  "b": [\n    1\n  ]\n}'),
        ("{{ '%s is %d' | format('a', 3) }}", "a is 3"),
        ("{{ '%s is %d' % ('a', 3) }}", "a is 3"),
        ("{{ '{} {:>3}'.format('a', 3) }}", "a   3"),
        ("{{ 'a'.ljust(3) ~ '7'.zfill(3) ~ 'b'.rjust(3) ~ ('c' | center(3)) }}", "a  007  b c "),
        ("{{ messages[:2] | join('+', attribute='role') }}", "system+user"),
        ("{{ ', '.join(messages | map(attribute='role')) }}", "system, user, assistant, user"),
        ("{{ 'a-b' | replace('-', '+') }}{{ 'a\nb' | indent(2) }}", "a+ba\n  b"),
        (
            "{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}{{ m.role }} {% endfor %}",
            "system user ",
        ),
        ("{% set n = namespace(x=1) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}{{ n.x }}", "5"),
        ("{{ 2 ** 10 }} {{ 7 // 2 }} {{ 3.14159 | round(2) }}", "1024 3 3.14"),
    ],
)
def test_filters_and_functions_are_those_of_transformers(text: str, expected: str) -> None:
    assert template(text).render(TALK) == expected


def test_what_is_set_in_a_generation_block_ends_with_it_as_in_transformers() -> None:
    assert template("{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}").render(TALK) == "1"


def test_templates_find_the_date() -> None:
    assert template("{{ strftime_now('%Y') }}").render(TALK) == time.strftime("%Y")


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update({'role': 'user'}) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(namespace) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ self._TemplateReference__context.environment }}{{ 1 / 0 }}",
        "{% for message in messages %}",
        "{% break %}",
        "{{ 1 / 0 }}",
        "{{ range(10**9) }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)
def test_what_the_sandbox_forbids_is_an_error_of_one_line(text: str) -> None:
    with pytest.raises(TemplateError) as caught:
        template(text).render([dict(message) for message in TALK])
    assert "\n" not in str(caught.value)


def test_a_prompt_beyond_the_limit_is_an_error_that_names_it() -> None:
    with pytest.raises(TemplateError, match="more than 8 MiB"):
        template("{{ 'x' * size }}").with_settings({"size": MAX_PROMPT_BYTES + 1}).render(TALK)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("a\n{% for m in messages %}\nb\n{% endif %}", 4),
        ("\n{{ messages | no_such_filter }}", 2),
        ("\n\n{{ messages[0].content + 1 }}", 3),
        ("{% macro f() %}\n{{ 1 / 0 }}\n{% endmacro %}\n\n{{ f() }}", 2),
    ],
)
def test_an_error_names_the_line_of_the_template(text: str, line: int) -> None:
    with pytest.raises(TemplateError, match=f"^line {line}: "):
        template(text).render(TALK)


def test_what_a_template_says_has_no_control_characters_for_a_terminal() -> None:
    for text in ("{{ raise_exception('a\x1b[2Jb\x07') }}", "{% no\x1b[2J %}", "{{ messages['\x1b[2J'].x.y }}"):
        with pytest.raises((Refused, TemplateError)) as caught:
            template(text).render(TALK)
        assert str(caught.value).isprintable()


def test_messages_are_not_changed() -> None:
    talk = [dict(message) for message in TALK]
    template(LLAMA2, "<s>", "</s>").render(talk)
    assert talk == TALK


def test_a_template_has_variables_of_its_own_and_none_of_ours_are_changed() -> None:
    text = "{{ enable_thinking }} {{ messages | length }} {{ add_generation_prompt }} {{ bos_token }}"
    settings = {"enable_thinking": False, "messages": [], "bos_token": "x"}
    plain = template(text, "<s>")
    assert plain.with_settings(settings).render(TALK) == f"False {len(TALK)} True <s>"
    assert plain.with_settings({}, begins_answer=False).render(TALK) == f" {len(TALK)} False <s>"
    assert plain.render(TALK) == f" {len(TALK)} True <s>", "the template itself is as it was"
