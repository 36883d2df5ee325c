"""The context length of a run without `--context`: as long as its KV cache takes a small share of the memory limit.

Published contexts of 131,072 or 262,144 tokens have KV caches of several gigabytes. Their memory is lent to neurons
until a sequence needs it, but the smallest limit counts all of it.
"""

from __future__ import annotations

from neuronpipe.plans.models.spec import ModelSpec

MIN_CONTEXT_TOKENS = 4096
KV_SHARE = 1 / 8  # of the memory limit, for the KV cache of all sequences
ELEMENT_BYTES = 2


def default_context(model: ModelSpec, limit_bytes: int, sequences: int) -> int:
    """Return the model's context length, halved until the KV cache of `sequences` sequences takes at most KV_SHARE of
    the limit, or until it would be below MIN_CONTEXT_TOKENS."""
    context_tokens = model.context_tokens
    token_bytes = sequences * ELEMENT_BYTES * model.position_elements
    while context_tokens * token_bytes > KV_SHARE * limit_bytes and context_tokens // 2 >= MIN_CONTEXT_TOKENS:
        context_tokens //= 2
    return context_tokens


def context_reason(model: ModelSpec, context_tokens: int, sequences: int) -> str:
    """Return why the context is shorter than the model's."""
    kv_bytes = sequences * ELEMENT_BYTES * model.position_elements * model.context_tokens
    return (
        f"a context of {context_tokens:,} tokens: the KV cache of the model's {model.context_tokens:,} would take "
        f"{kv_bytes >> 20:,} MiB, more than {KV_SHARE:.1%} of the limit; --context sets another length"
    )
