"""The bodies of `/api/tags`, `/api/show` and `/api/ps` of Ollama's API, which describe models."""

from __future__ import annotations

import math
import time
from typing import Any

from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.services.gateway.ollama.ollama_encoding import timestamp
from neuronpipe.services.gateway.runs.served_models import LATEST, ServedModel

FORMAT = "neuronpipe"
FOREVER_S = float((1 << 63) // 1_000_000_000)  # Ollama's longest duration, by which its clients recognize "forever"
UNITS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))


def tag_of(name: str) -> str:
    """Return a name with a tag: clients split it there."""
    return name if ":" in name else f"{name}{LATEST}"


def listed(model: ServedModel) -> dict[str, Any]:
    """Return the entry of a model in `/api/tags`."""
    return {**_head(model), "modified_at": timestamp(model.modified_at), "size": model.package.manifest.size_bytes}


def running(model: ServedModel, unused_for_s: float) -> dict[str, Any]:
    """Return the entry in `/api/ps` of a model that has a run.

    unused_for_s: after this time without requests the run ends; infinite if it does not end by itself
    """
    expires_at = time.time() + min(unused_for_s, FOREVER_S)
    return {
        **_head(model),
        "size": model.run_bytes,
        "size_vram": model.accelerator_bytes,
        "context_length": model.context_tokens,
        "expires_at": timestamp(expires_at),
    }


def described(model: ServedModel, *, fills_gaps: bool) -> dict[str, Any]:
    """Return the body of `/api/show`.

    fills_gaps: True if the model has tokens for text between a prompt and a suffix
    """
    manifest = model.package.manifest
    spec, family = manifest.model, manifest.model.family
    further = {"insert": fills_gaps, "thinking": model.chat.thinks}
    return {
        "modelfile": f"FROM {model.name}\n",
        "parameters": f"num_ctx {model.context_tokens}",
        "template": "" if manifest.chat is None else model.package.chat_template(),
        "details": _details(manifest),
        "model_info": {
            "general.architecture": family,
            "general.basename": model.name,
            "general.parameter_count": weights_of(spec),
            f"{family}.block_count": spec.layers,
            f"{family}.context_length": model.context_tokens,
            f"{family}.embedding_length": spec.width,
            f"{family}.vocab_size": spec.vocabulary,
        },
        "capabilities": ["completion", "tools", *(name for name, has in further.items() if has)],
        "modified_at": timestamp(model.modified_at),
    }


def weights_of(spec: ModelSpec) -> int:
    """Return the number of weights of embeddings, attention, recurrent layers and feed-forwards."""
    embeddings = spec.vocabulary * spec.width * (1 if spec.tied_embeddings else 2)
    feed_forwards = spec.ffns * spec.neurons * spec.width * (3 if spec.gated else 2)
    return embeddings + feed_forwards + spec.attention_weights + spec.recurrent_weights


def abbreviated(number: int) -> str:
    """Return a number with three digits and a unit, such as 7.62B."""
    unit, letter = next(((unit, letter) for unit, letter in UNITS if number >= unit), (1.0, ""))
    value = number / unit
    digits = 2 - int(math.log10(value)) if value else 0
    return f"{value:.{max(0, digits)}f}{letter}"


def _head(model: ServedModel) -> dict[str, Any]:
    name, manifest = tag_of(model.name), model.package.manifest
    return {"name": name, "model": name, "digest": manifest.id, "details": _details(manifest)}


def _details(manifest: Manifest) -> dict[str, Any]:
    family = manifest.model.family
    return {
        "parent_model": "",
        "format": FORMAT,
        "family": family,
        "families": [family],
        "parameter_size": abbreviated(weights_of(manifest.model)),
        "quantization_level": manifest.quantization.upper(),
    }
