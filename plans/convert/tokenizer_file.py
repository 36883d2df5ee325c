"""Reads the tokenizer.json of a package, or builds it from tokenizer.model, and checks that it fits the model."""

from __future__ import annotations

import os
from pathlib import Path

from neuronpipe.plans.convert.refusals import refuse_missing_tokenizer
from neuronpipe.plans.convert.sentencepiece_model import build_from_sentencepiece
from neuronpipe.plans.package.manifest import MAX_TOKENIZER_BYTES
from neuronpipe.plans.package.tokenizer import open_tokenizer
from neuronpipe.plans.strict_json import read_file
from neuronpipe.protocol.errors import UserError


def read_tokenizer(path: Path, vocabulary: int) -> bytes:
    """Return the content of tokenizer.json. Raises UserError as `check_tokenizer`, or if the file is missing.

    path: a tokenizer.json, copied unchanged, or a tokenizer.model, which is also read if it lies beside a path
        tokenizer.json that does not exist
    """
    if path.name == "tokenizer.json" and not os.path.exists(path) and os.path.exists(path.with_suffix(".model")):
        path = path.with_suffix(".model")
    refuse_missing_tokenizer(path)
    data = build_from_sentencepiece(path) if path.suffix == ".model" else read_file(path, MAX_TOKENIZER_BYTES)
    check_tokenizer(data, vocabulary, str(path))
    return data


def check_tokenizer(data: bytes, vocabulary: int, where: str) -> None:
    """Raise UserError, which starts with `where`, if the library cannot load the tokenizer or an id has no
    embedding."""
    ids = open_tokenizer(data, where).get_vocab(with_added_tokens=True).values()
    if (largest := max(ids, default=0)) >= vocabulary:
        raise UserError(f"{where}: token id {largest} has no embedding: the model's vocabulary is {vocabulary}")
