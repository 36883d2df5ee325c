"""Checks of paths that raise UserError. The errors say what the path is, and most name the next command."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

from neuronpipe.plans.gguf_part_names import gguf_models
from neuronpipe.plans.package.manifest import MANIFEST
from neuronpipe.plans.package.parsing.parse import what_is_in
from neuronpipe.protocol.errors import UserError

CONFIG = "config.json"
REPOSITORY = re.compile(r"(?:https?:/+huggingface\.co/)?([\w-][\w.-]*/[\w-][\w.-]*?)/?")


def refuse_no_source(path: Path) -> None:
    """Refuse a path that does not exist, such as a repository's name on Hugging Face, or is one file of a
    checkpoint."""
    if os.path.exists(path):  # unlike Path.exists, it raises nothing
        if path.suffix == ".safetensors" and path.is_file():
            raise UserError(
                f"{path}: one file of a checkpoint; convert its directory: "
                f"`neuronpipe convert {shlex.quote(str(path.parent))}`"
            )
        return
    if path.suffix == ".gguf":
        raise UserError(f"{path}: no such file")
    if match := REPOSITORY.fullmatch(str(path)):
        raise UserError(
            f"{path}: no such file or directory; a repository on Hugging Face is downloaded and converted with "
            f"`neuronpipe pull {match[1]}`"
        )
    if path.name == str(path):
        raise UserError(
            f"{path}: no such file or directory; expected a Hugging Face model's folder or a GGUF file, and "
            "`neuronpipe pull ORG/NAME` gets a model from a hub"
        )
    raise UserError(f"{path}: cannot be read: No such file or directory")


def refuse_other_directories(path: Path) -> None:
    """Refuse a directory that is a package already, or whose weights are in another format than safetensors."""
    quoted_path = shlex.quote(str(path))
    if os.path.exists(path / MANIFEST):
        raise UserError(f"{path}: a package already; run it with `neuronpipe run {quoted_path} -p TEXT`")
    if any(path.glob("*.safetensors")) or os.path.exists(path / "model.safetensors.index.json"):
        return
    if models := gguf_models(file.name for file in path.glob("*.gguf")):
        name, part = next(iter(models.items()))
        first = path / (name if part is None else part.names[0])
        raise UserError(
            f"{path}: holds GGUF and no safetensors; convert one model: `neuronpipe convert {shlex.quote(str(first))}`"
        )
    if any(path.glob("pytorch_model*.bin")) or any(path.glob("*.pth")):
        raise UserError(
            f"{path}: holds pickled weights and no safetensors; pickles can run code and are not read; download the "
            f"repository's safetensors, or write them with `{_saved_by('AutoModelForCausalLM', path)}` "
            "(needs transformers and torch)"
        )


def refuse_missing_config(path: Path) -> None:
    """Refuse a directory without config.json. The error names a model inside it."""
    if os.path.lexists(path / CONFIG):
        return
    inner = next((config.parent for config in sorted(path.glob(f"*/{CONFIG}"))), None)
    hint = "" if inner is None else f"; did you mean {inner}?"
    raise UserError(
        f"{path}: no package, which has {MANIFEST}, and no Hugging Face model, which has {CONFIG}: {what_is_in(path)}"
        + (hint or "; name the folder of one of these, or a GGUF file")
    )


def refuse_missing_tokenizer(path: Path) -> None:
    """Refuse a tokenizer's path that does not exist. The error says how to create the file."""
    if os.path.exists(path):
        return
    if path.name == "tokenizer.json" and os.path.exists(path.with_name("vocab.json")):
        raise UserError(
            f"{path}: missing, there is vocab.json only; make it with `{_saved_by('AutoTokenizer', path.parent)}` "
            "(needs transformers), or pass --tokenizer FILE"
        )
    raise UserError(f"{path}: missing; save the model's fast tokenizer there, or pass --tokenizer FILE")


def _saved_by(name: str, directory: Path) -> str:
    """Return a shell command that saves a directory's model or tokenizer in a supported format.

    name: class of transformers that loads it
    """
    load = f"from transformers import {name} as T; d = {json.dumps(str(directory))}"
    code = f"{load}; T.from_pretrained(d).save_pretrained(d)"
    return f"python -c {shlex.quote(code)}"
