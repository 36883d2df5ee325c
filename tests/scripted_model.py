"""A model that says what a test wants: each token is followed by those that the script names for it.

Its layers add nothing, so that the last hidden state is the embedding of the last token, and the output matrix maps
that to the next tokens. With a presence penalty of PENALTY the second of two successors follows the second time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from neuronpipe.plans.convert import convert
from neuronpipe.plans.package.reader import Package
from neuronpipe.services.gateway.templates.single_job import examine_template
from tokenizers import Tokenizer

from tests.conformance.checkpoints import TINY, Array, tensors, write_checkpoint, write_safetensors

PENALTY = 8.0  # more than the difference of neighbouring successors, and less than the preference for any of them
FIRST, STEP = 40.0, 4.0
END = "<|return|>"


def write_scripted_package(
    folder: Path, script: Mapping[str, Sequence[str]], template: str, *, special: Sequence[str], words: Sequence[str]
) -> Package:
    """Write a package whose model follows a script.

    script: for each token the texts of its successors, the most likely first; END ends the answer
    special, words: texts that are tokens of their own; only the special ones are no text
    """
    source = write_checkpoint(folder / "source", replace(TINY, context_tokens=1024))
    text = json.loads((source / "tokenizer.json").read_text())
    vocabulary, names = text["model"]["vocab"], [*special, *words]
    first = TINY.vocabulary - 1 - len(names)
    for name in [name for name, token in vocabulary.items() if first <= token < first + len(names)]:
        del vocabulary[name]
        text["model"]["merges"].pop()
    (end,) = text["added_tokens"]
    vocabulary.pop(end["content"], None)
    added = [
        {**end, "id": first + number, "content": name, "special": name in special} for number, name in enumerate(names)
    ]
    text["added_tokens"] = [*added, {**end, "content": END}]
    (source / "tokenizer.json").write_text(json.dumps(text))
    (source / "chat_template.jinja").write_text(template)
    ids = Tokenizer.from_file(str(source / "tokenizer.json")).token_to_id
    weights: dict[str, Array] = {name: values.copy() for name, values in tensors(TINY)}
    for name, values in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "embed_tokens.weight", "lm_head.weight")):
            values[:] = 0
        elif name == "model.norm.weight":
            values[:] = 1
    scale = np.sqrt(weights["model.norm.weight"].shape[0])
    for number, (token, successors) in enumerate(script.items()):
        weights["model.embed_tokens.weight"][ids(token), number] = 1
        for rank, successor in enumerate(successors):
            weights["lm_head.weight"][ids(successor), number] = (FIRST - STEP * rank) / scale
    stored = {name: ("F32", values.shape, values.tobytes()) for name, values in weights.items()}
    write_safetensors(source / "model.safetensors", stored)
    return convert(source, folder / "package", quantization="q8", predictor=False, examine_template=examine_template)
