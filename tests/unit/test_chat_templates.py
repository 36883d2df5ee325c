"""Chat templates: what real ones do comes out right, and what no template should do is stopped."""

from __future__ import annotations

import time

import pytest
from neuronpipe.services.gateway.templates import Refused, Template, TemplateError

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


def test_a_template_of_the_chatml_kind() -> None:
    assert Template(CHATML, "", "").render(TALK) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <b><|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_template_that_names_the_begin_and_end_tokens_and_checks_the_order() -> None:
    template = Template(LLAMA2, "<s>", "</s>")
    assert template.render(TALK) == (
        "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi <b> [/INST] Hello </s><s>[INST] And? [/INST]"
    )
    with pytest.raises(Refused, match="must alternate"):
        template.render([TALK[1], TALK[1]])


def test_what_templates_find_beside_the_messages() -> None:
    text = Template("{{ {'ä': '<'} | tojson }} {{ strftime_now('%Y') }}", "", "").render(TALK)
    assert text == '{"ä": "<"} ' + time.strftime("%Y")


@pytest.mark.parametrize(
    "text",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 'x' * 10**9 }}",
        "{{ 2 ** 10000000 }}",
        "{{ '%999999999d' % 1 }}",
        "{% set n = namespace(x='x' * 999) %}{% for i in range(20) %}{% set n.x = n.x + n.x %}{% endfor %}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ messages.append({}) }}",
        "{{ messages[0].update({'role': 'user'}) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% include '/etc/passwd' %}",
        "{{ self._TemplateReference__context.environment }}{{ 1 / 0 }}",
        "{% for message in messages %}",
        "{% break %}",
        "{{ 1 / 0 }}",
        "{{ range(10**9) }}",
        "{{ ('x' * 999999).replace('x', 'y' * 9999) }}",
        "{{ ('x' * 999999) | replace('', 'y' * 9999) }}",
        "{{ range(9999) | join('x' * 99999) }}",
        "{{ ('x' * 9999).join('y' * 9999) }}",
        "{{ 'x'.ljust(10**9) }}",
        "{{ '{:999999999}'.format(1) }}",
        "{{ '%999999999d' | format(1) }}",
        "{{ messages | tojson(indent=999999999) }}",
        "{{ 'a\n' | indent(999999999, first=true) }}",
    ],
)
def test_a_template_that_goes_astray_is_stopped_in_time(text: str) -> None:
    began = time.monotonic()
    with pytest.raises(TemplateError) as caught:
        Template(text, "", "").render([dict(message) for message in TALK])
    assert "\n" not in str(caught.value)
    assert time.monotonic() - began < 5


def test_messages_are_not_changed() -> None:
    talk = [dict(message) for message in TALK]
    Template(LLAMA2, "<s>", "</s>").render(talk)
    assert talk == TALK


def test_a_template_has_variables_of_its_own_and_none_of_ours_are_changed() -> None:
    text = "{{ enable_thinking }} {{ messages | length }} {{ add_generation_prompt }} {{ bos_token }}"
    settings = {"enable_thinking": False, "messages": [], "bos_token": "x"}
    template = Template(text, "<s>", "")
    assert template.with_settings(settings).render(TALK) == f"False {len(TALK)} True <s>"
    assert template.with_settings({}, answers=False).render(TALK) == f" {len(TALK)} False <s>"
    assert template.render(TALK) == f" {len(TALK)} True <s>", "the template itself is as it was"
