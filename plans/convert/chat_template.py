"""The chat template of a source, and the texts of the tokens that templates name."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from neuronpipe.plans.package.fields import Record, read_file, read_json
from neuronpipe.plans.package.manifest import MAX_TEMPLATE_BYTES
from neuronpipe.protocol.errors import quoted

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"


class ChatTemplate(NamedTuple):
    """A Jinja template, and what it calls `bos_token` and `eos_token`; "" where there is none."""

    text: str
    begin: str
    end: str


def huggingface_template(path: Path, chosen: Path | None) -> ChatTemplate | None:
    """That of a Hugging Face directory: the chosen file, or one of its own, or a field of tokenizer_config.json. None:
    a base model. Raises UserError where there are several and none is meant for everything."""
    config = read_json(path / CONFIG) if (path / CONFIG).exists() else Record({}, str(path / CONFIG))
    if chosen is not None or (path / TEMPLATE).exists():
        text: str | None = _decoded(chosen or path / TEMPLATE)
    else:
        text = _named_default(config) if config.has("chat_template") else None
    return None if text is None else ChatTemplate(text, _token(config, "bos_token"), _token(config, "eos_token"))


def gguf_template(metadata: Record, chosen: Path | None) -> ChatTemplate | None:
    """The chosen one, or that of a GGUF file's metadata."""
    if chosen is None and not metadata.has("tokenizer.chat_template"):
        return None
    pieces = metadata.items("tokenizer.ggml.tokens") if metadata.has("tokenizer.ggml.tokens") else []

    def piece(name: str) -> str:
        field = f"tokenizer.ggml.{name}_token_id"
        return str(pieces[metadata.integer(field, 0, len(pieces) - 1)]) if pieces and metadata.has(field) else ""

    text = metadata.text("tokenizer.chat_template") if chosen is None else _decoded(chosen)
    if len(text.encode(errors="replace")) > MAX_TEMPLATE_BYTES:
        metadata.fail("tokenizer.chat_template", f"longer than {MAX_TEMPLATE_BYTES} bytes")
    return ChatTemplate(text, piece("bos"), piece("eos"))


def _decoded(path: Path) -> str:
    data = read_file(path, MAX_TEMPLATE_BYTES)
    try:
        return data.decode()
    except UnicodeDecodeError:
        Record({}, str(path)).fail("text", "not UTF-8")


def _named_default(config: Record) -> str | None:
    """One template, or the one called "default" of several for different uses."""
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
    """A token's text; older files wrap it in an object."""
    if not config.has(name):
        return ""
    return config.record(name).text("content") if isinstance(config.value(name), dict) else config.text(name)
