"""Small random checkpoints of awkward shapes, made from a seed and a recipe: only golden logits need committing.

Nothing here imports the project: golden/make.py reads it too.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tests.conformance.dense_tensors import (
    LAYER_NORMED,
    NORMED_OUTPUTS,
    falcon_tensors,
    layer_normed_tensors,
    llama_tensors,
    nemotron_tensors,
    normed_tensors,
    opt_tensors,
    phi3_tensors,
)
from tests.conformance.mixture_tensors import PARTS, gemma4_tensors, gpt_oss_tensors, mixture_tensors
from tests.conformance.random_tensors import Array, bfloat16_bits, rounded
from tests.conformance.recipes import MODEL_TYPES, RECIPES, TINY, Recipe
from tests.conformance.recurrent_tensors import (
    RECURRENT_CLASSES,
    bamba_tensors,
    granite_hybrid_tensors,
    lfm2_tensors,
    nemotron_h_tensors,
    recurrent_tensors,
)
from tests.conformance.vision_language import LANGUAGE_CLASSES, vision_language_config, vision_language_tensors

__all__ = [
    "RECIPES",
    "TINY",
    "Array",
    "Recipe",
    "config",
    "rounded",
    "tensors",
    "tokenizer",
    "tokens",
    "write_checkpoint",
    "write_safetensors",
]

END_TOKEN = "<|end|>"

TENSORS: dict[str, Callable[[Recipe], Iterator[tuple[str, Array]]]] = {
    "OPTForCausalLM": opt_tensors,
    "NemotronForCausalLM": nemotron_tensors,
    "GptOssForCausalLM": gpt_oss_tensors,
    "FalconForCausalLM": falcon_tensors,
    "Phi3ForCausalLM": phi3_tensors,
    "Gemma4ForCausalLM": gemma4_tensors,
    "Lfm2ForCausalLM": lfm2_tensors,
    "Lfm2MoeForCausalLM": lfm2_tensors,
    "NemotronHForCausalLM": nemotron_h_tensors,
    "GraniteMoeHybridForCausalLM": granite_hybrid_tensors,
    "BambaForCausalLM": bamba_tensors,
    **dict.fromkeys(RECURRENT_CLASSES, recurrent_tensors),
    **dict.fromkeys(PARTS, mixture_tensors),
    **dict.fromkeys(NORMED_OUTPUTS, normed_tensors),
    **dict.fromkeys(LAYER_NORMED, layer_normed_tensors),
    **dict.fromkeys(LANGUAGE_CLASSES, vision_language_tensors),
}
"""What makes the tensors of a class; those of other classes are made as Llama's."""


def tensors(recipe: Recipe) -> Iterator[tuple[str, Array]]:
    """Every tensor under its Hugging Face name, rounded to the recipe's dtype."""
    return TENSORS.get(recipe.architecture, llama_tensors)(recipe)


def tokens(recipe: Recipe, count: int = 40) -> list[int]:
    """A token list that repeats itself a little and starts with the last id."""
    raw = np.random.PCG64(recipe.seed + 1000).random_raw(count) % recipe.vocabulary
    return [
        recipe.vocabulary - 1,
        *(int(token) for token in raw[: count // 2]),
        *(int(t) for t in raw[: count - count // 2 - 1]),
    ]


def _opt_config(recipe: Recipe) -> dict[str, Any]:
    return {
        "architectures": [recipe.architecture],
        "model_type": "opt",
        "activation_function": recipe.activation,
        "hidden_size": recipe.width,
        "word_embed_proj_dim": recipe.width,
        "ffn_dim": recipe.neurons,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.query_heads,
        "vocab_size": recipe.vocabulary,
        "max_position_embeddings": recipe.context_tokens,
        "tie_word_embeddings": recipe.tied,
        "eos_token_id": recipe.vocabulary - 1,
        "bos_token_id": None,
        "pad_token_id": None,
        **recipe.config,
    }


def _falcon_config(recipe: Recipe) -> dict[str, Any]:
    return {
        "architectures": [recipe.architecture],
        "model_type": "falcon",
        "hidden_size": recipe.width,
        "ffn_hidden_size": recipe.neurons,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.query_heads,
        "num_kv_heads": recipe.key_heads,
        "vocab_size": recipe.vocabulary,
        "max_position_embeddings": recipe.context_tokens,
        "tie_word_embeddings": recipe.tied,
        "eos_token_id": recipe.vocabulary - 1,
        "bos_token_id": None,
        **recipe.config,
    }


def _llama_config(recipe: Recipe) -> dict[str, Any]:
    return {
        "architectures": [recipe.architecture],
        "model_type": MODEL_TYPES[recipe.architecture],
        "hidden_act": recipe.activation,
        "hidden_size": recipe.width,
        "intermediate_size": recipe.neurons,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.query_heads,
        "num_key_value_heads": recipe.key_heads,
        "head_dim": recipe.head_width,
        "vocab_size": recipe.vocabulary,
        "max_position_embeddings": recipe.context_tokens,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": recipe.tied,
        "eos_token_id": recipe.vocabulary - 1,
        "bos_token_id": None,
        **recipe.config,
    }


def _vision_language_config(recipe: Recipe) -> dict[str, Any]:
    return vision_language_config(_llama_config(recipe))


CONFIGURATIONS = {
    "OPTForCausalLM": _opt_config,
    "FalconForCausalLM": _falcon_config,
    **dict.fromkeys(LANGUAGE_CLASSES, _vision_language_config),
}


def config(recipe: Recipe) -> dict[str, Any]:
    """The recipe's config.json."""
    return CONFIGURATIONS.get(recipe.architecture, _llama_config)(recipe)


def tokenizer(vocabulary: int) -> Tokenizer:
    """Byte-level BPE of exactly `vocabulary` ids: the bytes, pairs of letters, and one special token, the last id."""
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in "etaoinshrdlu" for b in "abcdefghijklmnopqrstuvwxyz"][: vocabulary - len(pieces) - 1]
    pieces += [a + b for a, b in pairs]
    result = Tokenizer(models.BPE(vocab={piece: n for n, piece in enumerate(pieces)}, merges=pairs))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    result.add_special_tokens([END_TOKEN])
    return result


def write_checkpoint(directory: Path, recipe: Recipe, more: dict[str, Array] | None = None) -> Path:
    """Write the recipe as a Hugging Face directory and return it: config.json, safetensors, tokenizer.json. more: other
    tensors among those of the recipe."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config(recipe), indent=1))
    (directory / "tokenizer.json").write_text(tokenizer(recipe.vocabulary).to_str())
    stored = {name: _stored(values, recipe.dtype) for name, values in [*tensors(recipe), *(more or {}).items()]}
    if recipe.shards == 1:
        write_safetensors(directory / "model.safetensors", stored)
        return directory
    names = list(stored)
    places = {
        name: f"model-{n % recipe.shards + 1:05}-of-{recipe.shards:05}.safetensors" for n, name in enumerate(names)
    }
    for file in sorted(set(places.values())):
        write_safetensors(directory / file, {name: stored[name] for name in names if places[name] == file})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return directory


Stored = tuple[str, tuple[int, ...], bytes]


def _stored(values: Array, dtype: str) -> Stored:
    stored = {"F32": values.copy, "F16": lambda: values.astype(np.float16), "BF16": lambda: bfloat16_bits(values)}[
        dtype
    ]()
    return dtype, values.shape, stored.tobytes()


def write_safetensors(path: Path, tensors: dict[str, Stored]) -> None:
    """Write (dtype, shape, bytes) by name, as the format says: header length, header, bytes back to back."""
    header, offset = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))
