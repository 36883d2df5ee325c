"""How models write calls of functions, as their chat templates show it: small templates of the families there are."""

from __future__ import annotations

import dataclasses
import json

import pytest
from neuronpipe.services.gateway.answers.answer_format import AnswerFormat, Call, parse_answer
from neuronpipe.services.gateway.answers.thinking_format import HARMONY as KNOWN_HARMONY
from neuronpipe.services.gateway.templates.call_format import DEFAULT, CallFormat
from neuronpipe.services.gateway.templates.format_probe import probe_format
from neuronpipe.services.gateway.templates.sandbox import Template
from neuronpipe.services.gateway.templates.template_jobs import TemplateSource

TURNS = """{%- for m in messages %}{% if m.role == 'tool' %}[result]{{ m.content }}
{%- elif m.tool_calls is defined %}CALLS{% else %}[{{ m.role }}]{{ m.content }}[end]{% endif %}{% endfor %}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"

# A block for each call; a message may have text before it.
BLOCKS = (
    TOOLS
    + """{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if m.content %}{{- '\n' + m.content }}{% endif %}
        {%- for call in m.tool_calls %}
            {%- if call.function is defined %}{% set call = call.function %}{% endif %}
            {{- '\n<tool_call>\n{"name": "' }}{{ call.name }}{{ '", "arguments": ' }}
            {{- call.arguments | tojson }}{{ '}\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
)

# The same, with an empty thought before the last answer, which is no part of the call.
THINKING = BLOCKS.replace("{{- '<|im_start|>assistant' }}", "{{- '<|im_start|>assistant\n<think>\n\n</think>\n' }}")
THINKING = THINKING.replace(
    "{{- '<|im_start|>' + m.role + '\n' + m.content",
    "{{- '<|im_start|>' + m.role + '\n' + ('<think>\n\n</think>\n\n' if m.role == 'assistant' else '') + m.content",
)

# A list after a special token; calls have ids of nine characters.
LIST = """{%- if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}{{ bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}{{- '[INST] ' + m.content + '[/INST]' }}
    {%- elif m.tool_calls is defined and m.tool_calls is not none %}
        {{- '[TOOL_CALLS] [' }}
        {%- for call in m.tool_calls %}
            {%- set out = call.function | tojson %}{{- out[:-1] }}
            {%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
            {{- ', "id": "' + call.id + '"}' }}
            {%- if not loop.last %}{{- ', ' }}{% else %}{{- ']' + eos_token }}{% endif %}
        {%- endfor %}
    {%- elif m.role == 'assistant' %}{{- ' ' + m.content + eos_token }}
    {%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}{% endif %}
{%- endfor %}"""

# JSON without a marker; one call only.
BARE = """{{- bos_token }}{%- for m in messages %}
    {%- if loop.first and tools %}{{ '\nFunctions: ' + tools | tojson }}{% endif %}
    {%- if m.tool_calls is defined %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('one at a time') }}{% endif %}
        {%- set call = m.tool_calls[0].function %}
        {{- '<|start|>assistant<|stop|>\n\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{ '}<|eot|>' }}
    {%- else %}{{- '<|start|>' + m.role + '<|stop|>\n\n' + m.content | trim + '<|eot|>' }}{% endif %}
{%- endfor %}{%- if add_generation_prompt %}{{ '<|start|>assistant<|stop|>\n\n' }}{% endif %}"""

# Names outside of the JSON, a frame round all calls, arguments as text, and nothing as their content.
FRAMED = (
    TOOLS
    + """{%- for m in messages %}
    {%- if m.role == 'assistant' and m.content is none %}
        {{- '<calls>' }}
        {%- for call in m.tool_calls %}
            {{- '<call>function<sep>' + call.function.name + '\n```json\n' + call.function.arguments + '\n```</call>' }}
            {%- if not loop.last %}{{ '\n' }}{% endif %}
        {%- endfor %}{{ '</calls><eos>' }}
    {%- elif m.role == 'assistant' %}{{ m.content + '<eos>' }}
    {%- else %}{{ '<' + m.role + '>' + m.content }}{% endif %}
{%- endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
)

# A tag with the name in it; no white space.
TAGS = TOOLS + TURNS.replace(
    "CALLS",
    "[assistant]{% for c in m.tool_calls %}<function={{ c.function.name }}>{{ c.function.arguments | tojson }}"
    "</function>{% endfor %}[end]",
)

# Another end token after calls than after texts, and a list of tools that must be one.
ENDING = "{% for t in tools %}{{ t | tojson }}{% endfor %}" + TURNS.replace("[end]", "<|eot|>").replace(
    "CALLS",
    "[assistant]{% for c in m.tool_calls %}<function={{ c.function.name }}>{{ c.function.arguments | tojson }}"
    "</function>{% endfor %}<|eom|>",
)

# A number for each call.
NUMBERED = TOOLS + TURNS.replace(
    "CALLS",
    "[assistant]<act>[{% for c in m.tool_calls %}{{ ', ' if not loop.first }}"
    '{"call": "{{ loop.index0 }}", "tool": "{{ c.function.name }}", "with": {{ c.function.arguments | tojson }}}'
    "{% endfor %}]</act>[end]",
)

PARAMETERS = TOOLS + TURNS.replace(
    "CALLS",
    "[assistant]{% for c in m.tool_calls %}<tool_call><function={{ c.function.name }}>{% for k, v in "
    "c.function.arguments.items() %}<parameter={{ k }}>{{ v }}</parameter>{% endfor %}</function></tool_call>"
    "{% endfor %}[end]",
)

UNCLOSED = PARAMETERS.replace("<parameter={{ k }}>{{ v }}</parameter>", "{{ k }} is {{ v }}; ")

# The same on several lines, as Qwen3-Coder writes it, and with tags of their own for names and values, as GLM-4.5 does.
LINES = TOOLS + TURNS.replace(
    "CALLS",
    "[assistant]{% for c in m.tool_calls %}{{ '\\n<tool_call>\\n<function=' + c.function.name + '>\\n' }}"
    "{% for k, v in c.function.arguments.items() %}{{ '<parameter=' + k + '>\\n' }}"
    "{{ v if v is string else v | tojson }}{{ '\\n</parameter>\\n' }}{% endfor %}"
    "{{ '</function>\\n</tool_call>' }}{% endfor %}[end]",
)
KEYS = TOOLS + TURNS.replace(
    "CALLS",
    "[assistant]{% for c in m.tool_calls %}{{ '\\n<tool_call>' + c.function.name + '\\n' }}"
    "{% for k, v in c.function.arguments.items() %}{{ '<arg_key>' + k + '</arg_key>\\n<arg_value>' }}"
    "{{ v if v is string else v | tojson }}{{ '</arg_value>\\n' }}{% endfor %}{{ '</tool_call>' }}{% endfor %}[end]",
)

# Messages with channels, as gpt-oss writes them: the recipient stands before the channel.
HARMONY = """{%- for t in tools %}{{ t | tojson }}{% endfor %}{%- for m in messages %}
{%- if m.role == 'tool' %}<|start|>functions to=assistant<|channel|>commentary<|message|>{{ m.content | tojson }}<|end|>
{%- elif m.tool_calls is defined %}
    {%- if m.content and m.thinking %}{{ raise_exception('not both') }}{% endif %}
    {%- if m.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
    {%- set call = m.tool_calls[0].function %}
    {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
    {{- call.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' %}
    {%- if m.thinking and loop.last %}<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}
    {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
    {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- else %}{{ '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}{% set effort = reasoning_effort %}
{#- <|channel|>analysis<|message|> <|channel|>final<|message|> #}"""

# What is found in LIST and in BARE; other tests read and follow answers of these forms.
ID = "\0" * 9
LIST_FORM = CallFormat(
    before='[TOOL_CALLS] [{"name": "',
    between='", "arguments": ',
    next=f', "id": "{ID}"}}, {{"name": "',
    after=f', "id": "{ID}"}}]',
    marker="[TOOL_CALLS]",
    by_template=True,
    own_ids=True,
)
BARE_FORM = CallFormat(
    before='{"name": "', between='", "parameters": ', next="", after="}", marker="", by_template=True
)


def compiled(text: str) -> Template:
    return Template(TemplateSource(text, "<s>", "</s>"))


def found(template: str) -> CallFormat:
    return probe_format(compiled(template)).form


@pytest.mark.parametrize("template", [BLOCKS, THINKING], ids=["blocks", "thinking"])
def test_a_block_for_each_call(template: str) -> None:
    assert found(template) == dataclasses.replace(DEFAULT, by_template=True)


def test_a_list_whose_calls_have_ids() -> None:
    assert found(LIST) == LIST_FORM


def test_json_without_a_marker_and_only_one_call() -> None:
    assert found(BARE) == BARE_FORM


def test_a_frame_round_calls_whose_arguments_are_text() -> None:
    assert found(FRAMED) == CallFormat(
        before="<calls><call>function<sep>",
        between="\n```json\n",
        next="\n```</call>\n<call>function<sep>",
        after="\n```</call></calls>",
        marker="<calls>",
        by_template=True,
        objects=False,
        empty=None,
    )


@pytest.mark.parametrize("template", [TAGS, ENDING], ids=["one end", "two ends"])
def test_names_in_tags(template: str) -> None:
    assert found(template) == CallFormat(
        before="<function=",
        between=">",
        next="</function><function=",
        after="</function>",
        marker="<function=",
        by_template=True,
    )


def test_numbers_of_calls_may_be_any() -> None:
    """Also the first: a template may go on counting in later messages."""
    form = found(NUMBERED)
    assert form.before == '<act>[{"call": "\0", "tool": "'
    assert (form.next, form.after) == ('}, {"call": "\0", "tool": "', "}]</act>")


@pytest.mark.parametrize(
    "template",
    [TURNS, TURNS.replace("CALLS", "{{ m.tool_calls }}"), TOOLS + TURNS, UNCLOSED, "{{ 1 / 0 }}"],
    ids=["no tools", "unwritten tools", "unwritten calls", "arguments without tags", "failing"],
)
def test_a_template_that_writes_no_such_calls_has_the_stated_format(template: str) -> None:
    assert found(template) is DEFAULT


def test_arguments_that_are_written_one_by_one() -> None:
    assert found(LINES) == CallFormat(
        before="<tool_call>\n<function=",
        between=">\n",
        next="</function>\n</tool_call>\n<tool_call>\n<function=",
        after="</function>\n</tool_call>",
        marker="<tool_call>",
        by_template=True,
        parameter_before="<parameter=",
        parameter_between=">\n",
        parameter_after="\n</parameter>\n",
    )
    keys = found(KEYS)
    assert (keys.before, keys.between, keys.after) == ("<tool_call>", "\n", "</tool_call>")
    assert (keys.parameter_before, keys.parameter_between) == ("<arg_key>", "</arg_key>\n<arg_value>")
    assert found(PARAMETERS).parameter_after == "</parameter>"


def test_channels_have_a_format_that_is_known() -> None:
    assert found(HARMONY) == KNOWN_HARMONY.calls


@pytest.mark.parametrize(
    "template",
    [BLOCKS, LIST, FRAMED, TAGS, LINES, KEYS],
    ids=["blocks", "list", "framed", "tags", "lines", "keys"],
)
def test_what_the_template_writes_is_read_as_the_calls_that_it_was_given(template: str) -> None:
    form, one = found(template), compiled(template)
    calls = [("call_1", "look_up", '{"of": "a }]\\"}"}'), ("call_2", "f", '{"deep": [{"x": {}}]}')]
    text = one.render([{"role": "user", "content": "?"}, form.message("", calls)], answer=False)
    _, said, made, complete = parse_answer(text[text.index(form.marker) :], AnswerFormat(calls=form))
    assert said == ""
    assert complete
    assert [(call.name, json.loads(call.arguments)) for call in made] == [(n, json.loads(a)) for _, n, a in calls]
    if not form.parameter_before:
        assert made[0] == Call("look_up", calls[0][2])
