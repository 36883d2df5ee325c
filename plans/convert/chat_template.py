"""The chat template of a source, and the texts of the tokens that it refers to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from neuronpipe.plans.convert.end_tokens import ids_at
from neuronpipe.plans.package.manifest import MAX_TEMPLATE_BYTES
from neuronpipe.plans.strict_json import Record, read_file, read_json
from neuronpipe.protocol.errors import UserError, quoted

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"


class ChatTemplate(NamedTuple):
    """A chat template.

    text: in Jinja
    begin, end: texts of `bos_token` and `eos_token`; "" if the model has none
    where: the file or field that contains the template
    """

    text: str
    begin: str
    end: str
    where: str


class TemplateFacts(NamedTuple):
    """The behaviour of a chat template, found by trial.

    closing: text that it writes after a complete answer
    error: why it fails for a conversation, with the line; None: it works
    tools_error: why it fails if functions are offered or called; None: it works
    """

    closing: str = ""
    error: str | None = None
    tools_error: str | None = None

    def notes(self, template: ChatTemplate | None) -> tuple[str, ...]:
        """Return what the user should know about the template; empty if it works."""
        if template is None:
            return ()
        if self.error is not None:
            instead = "correct it and convert again, or give another one with --chat-template FILE"
            return (f"{template.where}: {self.error}; conversations will fail with it: {instead}",)
        if self.tools_error is not None:
            return (f"{template.where}: {self.tools_error}; functions will be told and called in a stated format",)
        return ()


ExamineTemplate = Callable[[ChatTemplate], TemplateFacts]
"""Tries a template. Templates are foreign programs, so the function limits their time and memory."""


def examined(template: ChatTemplate | None, examine: ExamineTemplate | None, chosen: Path | None) -> TemplateFacts:
    """Return the facts about a template; the defaults if there is no template or `examine` is None. Raises UserError if
    the template fails and is from the user's file `chosen`."""
    if template is None or examine is None:
        return TemplateFacts()
    facts = examine(template)
    if chosen is not None and facts.error is not None:
        raise UserError(f"{chosen}: {facts.error}")
    return facts


def huggingface_template(path: Path, chosen: Path | None) -> ChatTemplate | None:
    """Return the template of a Hugging Face directory; None if there is none, as for base models.

    Its source is the user's file `chosen`, or chat_template.jinja, or the field of tokenizer_config.json. Raises
    UserError if that field has several and none is the default.
    """
    config = _tokenizer_config(path)
    where = chosen or path / TEMPLATE
    if chosen is not None or where.exists():
        text: str | None = _decoded(where)
    else:
        text, where = _named_default(config) if config.has("chat_template") else None, path / CONFIG
    if text is None:
        return None
    return ChatTemplate(text, _token(config, "bos_token"), _token(config, "eos_token"), where.name)


def huggingface_end(path: Path) -> str:
    """Return the text of `eos_token` in tokenizer_config.json; "" if there is none."""
    return _token(_tokenizer_config(path), "eos_token")


def _tokenizer_config(path: Path) -> Record:
    return read_json(path / CONFIG) if (path / CONFIG).exists() else Record({}, str(path / CONFIG))


def gguf_template(metadata: Record, chosen: Path | None) -> ChatTemplate | None:
    """Return the template in the user's file `chosen`, or in a GGUF file's metadata; None if there is none."""
    if chosen is None and not metadata.has("tokenizer.chat_template"):
        return None
    pieces = metadata.items("tokenizer.ggml.tokens") if metadata.has("tokenizer.ggml.tokens") else []

    def piece(name: str) -> str:
        field = f"tokenizer.ggml.{name}_token_id"
        return str(pieces[ids_at(metadata, field, len(pieces))[0]]) if pieces and metadata.has(field) else ""

    text = metadata.text("tokenizer.chat_template") if chosen is None else _decoded(chosen)
    if len(text.encode(errors="replace")) > MAX_TEMPLATE_BYTES:
        metadata.fail("tokenizer.chat_template", f"longer than {MAX_TEMPLATE_BYTES} bytes")
    where = "tokenizer.chat_template" if chosen is None else chosen.name
    return ChatTemplate(text, piece("bos"), piece("eos"), where)


def _decoded(path: Path) -> str:
    data = read_file(path, MAX_TEMPLATE_BYTES)
    try:
        return data.decode()
    except UnicodeDecodeError:
        Record({}, str(path)).fail("text", "not UTF-8")


def _named_default(config: Record) -> str | None:
    """Return the only template, or the one named "default" of several; None if the list is empty."""
    if isinstance(config.value("chat_template"), str):
        return config.text("chat_template")
    entries = [
        Record(entry, config.where, "chat_template.")
        for entry in config.items("chat_template")
        if isinstance(entry, dict)
    ]
    by_name = {entry.text("name"): entry.text("template") for entry in entries}
    if by_name and "default" not in by_name:
        config.fail(
            "chat_template",
            f"holds {quoted(list(by_name))}, and none is called 'default': write the one that you want into a file, "
            "and pass --chat-template FILE",
        )
    return by_name.get("default")


def _token(config: Record, name: str) -> str:
    """Return a token's text, which older files wrap in an object; "" if there is none."""
    if not config.has(name):
        return ""
    return config.record(name).text("content") if isinstance(config.value(name), dict) else config.text(name)
