"""Chat templates on their way into a package: from each place where a source may keep one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from neuronpipe.plans.convert import Encoded, convert
from neuronpipe.plans.package.manifest import Chat
from neuronpipe.protocol.errors import UserError
from neuronpipe.services.gateway.templates.single_job import examine_template

from tests.conformance.checkpoints import TINY, tokenizer, write_checkpoint
from tests.conformance.gguf_files import write_gguf

TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": TEMPLATE, "bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}},
        {
            "chat_template": [{"name": "tools", "template": "x"}, {"name": "default", "template": TEMPLATE}],
            "bos_token": {"content": "<s>"},
            "eos_token": "</s>",
        },
    ],
)
def test_a_hugging_face_source_has_it_in_the_tokenizers_configuration(
    tmp_path: Path, config: dict[str, object]
) -> None:
    source = write_checkpoint(tmp_path / "source", TINY)
    (source / "tokenizer_config.json").write_text(json.dumps(config))
    package = convert(source, tmp_path / "package", quantization="q8")
    assert package.chat_template() == TEMPLATE
    assert package.manifest.chat == Chat(begin="<s>", end="</s>")


def test_a_file_of_its_own_goes_before_the_configuration(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", TINY)
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": "old", "bos_token": None}))
    (source / "chat_template.jinja").write_text(TEMPLATE)
    package = convert(source, tmp_path / "package", quantization="q8")
    assert package.chat_template() == TEMPLATE
    assert package.manifest.chat == Chat(begin="", end="")


def test_a_gguf_file_has_it_in_its_metadata(tmp_path: Path) -> None:
    metadata = {"tokenizer.chat_template": TEMPLATE}
    package = convert(write_gguf(tmp_path / "m.gguf", TINY, metadata=metadata), tmp_path / "package", quantization="q8")
    assert package.chat_template() == TEMPLATE
    assert package.manifest.chat is not None


def test_a_source_without_one_makes_a_package_without_one(tmp_path: Path) -> None:
    package = convert(write_checkpoint(tmp_path / "source", TINY), tmp_path / "package", quantization="q8")
    assert package.manifest.chat is None
    assert not (package.path / "chat_template.jinja").exists()


def test_a_template_that_was_changed_is_noticed(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", TINY)
    (source / "chat_template.jinja").write_text(TEMPLATE)
    package = convert(source, tmp_path / "package", quantization="q8")
    file = package.path / "chat_template.jinja"
    file.write_text(TEMPLATE.replace("content", "contint"))
    with pytest.raises(UserError, match=r"chat_template\.jinja"):
        package.chat_template()
    with pytest.raises(UserError, match=r"chat_template\.jinja"):
        package.verify_fixed()


@pytest.mark.parametrize("kind", ["directory", "gguf"])
def test_a_template_that_is_chosen_goes_before_the_sources(kind: str, tmp_path: Path) -> None:
    chosen = tmp_path / "mine.jinja"
    chosen.write_text(TEMPLATE)
    if kind == "gguf":
        source = write_gguf(tmp_path / "m.gguf", TINY, metadata={"tokenizer.chat_template": "old"})
    else:
        source = write_checkpoint(tmp_path / "source", TINY)
        (source / "chat_template.jinja").write_text("old")
    assert convert(source, tmp_path / "package", chat_template=chosen).chat_template() == TEMPLATE
    with pytest.raises(UserError, match=r"none\.jinja: cannot be read"):
        convert(source, tmp_path / "other", chat_template=tmp_path / "none.jinja")


def test_which_of_several_templates_is_meant_must_be_said(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", TINY)
    several = [{"name": name, "template": TEMPLATE} for name in ("rag", "tool_use")]
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    with pytest.raises(UserError, match=r"chat_template: holds \['rag', 'tool_use'\].* pass --chat-template FILE"):
        convert(source, tmp_path / "package")
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    assert convert(source, tmp_path / "package", chat_template=tmp_path / "mine.jinja").manifest.chat is not None


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"


@pytest.mark.parametrize("kind", ["directory", "gguf"])
def test_a_template_that_does_not_compile_is_reported_with_the_line(kind: str, tmp_path: Path) -> None:
    broken = "\n{% if messages %}\n{% endfor %}"
    if kind == "gguf":
        source = write_gguf(tmp_path / "m.gguf", TINY, metadata={"tokenizer.chat_template": broken})
    else:
        source = write_checkpoint(tmp_path / "source", TINY)
        (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": broken}))
    reports: list[Encoded] = []
    convert(source, tmp_path / "package", examine_template=examine_template, report=reports.append)
    (note,) = reports[0].notes
    assert "chat_template: line 3: " in note or "tokenizer_config.json: line 3: " in note
    assert "--chat-template FILE" in note
    chosen = tmp_path / "mine.jinja"
    chosen.write_text(broken)
    with pytest.raises(UserError, match=r"mine\.jinja: line 3: "):
        convert(source, tmp_path / "other", chat_template=chosen, examine_template=examine_template)


def test_a_template_that_fails_with_functions_is_reported(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", TINY)
    (source / "chat_template.jinja").write_text(TURNS + "{% if tools %}{{ tools | no_filter }}{% endif %}")
    (source / "tokenizer_config.json").write_text("{}")
    reports: list[Encoded] = []
    convert(source, tmp_path / "package", examine_template=examine_template, report=reports.append)
    assert "line 1: " in reports[0].notes[0]


def test_a_turn_ends_with_what_the_template_closes_it_with(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", TINY)
    shorter = tokenizer(298)
    shorter.add_special_tokens(["</assistant>"])
    (source / "tokenizer.json").write_text(shorter.to_str())
    (source / "chat_template.jinja").write_text(TURNS)
    package = convert(source, tmp_path / "package", examine_template=examine_template)
    assert package.manifest.end_tokens == (299, 298)
