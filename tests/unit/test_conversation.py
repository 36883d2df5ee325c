"""A conversation in the terminal becomes the text that the package's template makes of it; a base model continues."""

from __future__ import annotations

import json

import pytest
from neuronpipe.launch.generation.conversation import NO_ROLES, Conversation, with_chat_template
from neuronpipe.launch.planning import DEMO
from neuronpipe.plans.convert import convert
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.messages.request import Generate

from tests.conformance.checkpoints import TINY, write_checkpoint

ROLES = (
    "{% if messages[-1].content == 'no' %}{{ raise_exception('not that') }}{% endif %}"
    "{% if messages[-1].content == 'grow' %}{% set n = namespace(all=[]) %}"
    "{% for i in range(200) %}{% set n.all = n.all + ['x' * (8000000 + i)] %}{% endfor %}{{ n.all }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
)
ASK = Generate(request="1", prompt="hello", max_tokens=4)


@pytest.fixture(scope="module")
def with_template(tmp_path_factory: pytest.TempPathFactory) -> Package:
    folder = tmp_path_factory.mktemp("package")
    source = write_checkpoint(folder / "source", TINY)
    (source / "chat_template.jinja").write_text(ROLES)
    return convert(source, folder / "package", quantization="q8")


def test_a_prompt_is_the_first_message_where_the_package_has_a_template(with_template: Package) -> None:
    asked, _ = with_chat_template(ASK, with_template, None)
    assert (asked.prompt, asked.frame) == ("[user]hello[assistant]", False)
    told, _ = with_chat_template(ASK, with_template, "Be brief.")
    assert told.prompt == "[system]Be brief.[user]hello[assistant]"


def test_to_a_base_model_a_prompt_goes_as_it_stands() -> None:
    assert with_chat_template(ASK, Package.open(DEMO), None) == (ASK, None)
    with pytest.raises(UserError, match=NO_ROLES):
        with_chat_template(ASK, Package.open(DEMO), "Be brief.")


def test_a_base_model_continues_its_own_answers() -> None:
    """What it has computed is the beginning of the next prompt, so that the run need not compute it again."""
    talk = Conversation(Package.open(DEMO))
    talk.turns += [("user", "def f(x):"), ("assistant", "\n    return x")]
    first = talk.prompt().text
    talk.turns.append(("user", "def g(x):"))
    assert talk.prompt() == (f"{first}\ndef g(x):", True, None)


def test_what_the_model_is_told_before_can_be_taken_back(with_template: Package) -> None:
    talk = Conversation(with_template, "a")
    talk.turns.append(("user", "b"))
    assert [m["role"] for m in talk.messages] == ["system", "user"]
    talk.set_system("")
    assert (talk.system, talk.prompt().text) == (None, "[user]b[assistant]")


def test_a_template_that_refuses_or_grows_beyond_all_bounds_is_one_line(with_template: Package) -> None:
    for said, why in (("no", "refuses this: not that"), ("grow", "the chat template fails: .* 64 MiB .*--raw")):
        talk = Conversation(with_template)
        talk.turns.append(("user", said))
        with pytest.raises(UserError, match=why) as caught:
            talk.prompt()
        assert "\n" not in str(caught.value)


def test_a_conversation_is_saved_as_messages_or_to_read(with_template: Package) -> None:
    talk = Conversation(with_template, "Be brief.")
    talk.turns += [("user", "Hä?"), ("assistant", " Yes.\n")]
    assert json.loads(talk.export(as_json=True)) == {"messages": talk.messages}
    assert talk.export(as_json=False) == "## system\n\nBe brief.\n\n## user\n\nHä?\n\n## assistant\n\nYes.\n"
