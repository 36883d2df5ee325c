"""The registry of families. A new family needs a file in this folder and a line in `FAMILIES`."""

from __future__ import annotations

from collections.abc import Mapping

from neuronpipe.plans.models import (
    arcee,
    bailing,
    bamba,
    cohere,
    deepseek,
    ernie,
    falcon,
    gemma,
    gemma4,
    glm4_moe,
    gpt_neox,
    gpt_oss,
    granite,
    granite_hybrid,
    hunyuan,
    lfm2,
    llama,
    minicpm,
    mistral3,
    mixtral,
    nemotron,
    nemotron_h,
    olmo,
    olmo2,
    olmoe,
    opt,
    phi,
    qwen3,
    qwen3_next,
    smallthinker,
    smollm3,
    sparse_llama,
    stablelm,
)
from neuronpipe.plans.models.family import Architecture, Family, GgufArchitecture

FAMILIES: Mapping[str, Family] = {
    family.name: family
    for family in (
        llama.FAMILY,
        qwen3.FAMILY,
        mixtral.FAMILY,
        smallthinker.FAMILY,
        opt.FAMILY,
        nemotron.FAMILY,
        falcon.FAMILY,
        sparse_llama.FAMILY,
        minicpm.FAMILY,
        arcee.FAMILY,
        gpt_oss.FAMILY,
        smollm3.FAMILY,
        granite.FAMILY,
        glm4_moe.FAMILY,
        olmoe.FAMILY,
        ernie.FAMILY,
        hunyuan.FAMILY,
        phi.FAMILY,
        deepseek.FAMILY,
        gemma.FAMILY,
        gemma4.FAMILY,
        olmo2.FAMILY,
        qwen3_next.FAMILY,
        lfm2.FAMILY,
        nemotron_h.FAMILY,
        granite_hybrid.FAMILY,
        bamba.FAMILY,
        stablelm.FAMILY,
        cohere.FAMILY,
        gpt_neox.FAMILY,
        bailing.FAMILY,
        olmo.FAMILY,
        mistral3.FAMILY,
    )
}

ARCHITECTURES: Mapping[str, Architecture] = {
    name: architecture for family in FAMILIES.values() for name, architecture in family.architectures.items()
}

GGUF_ARCHITECTURES: Mapping[str, tuple[Family, GgufArchitecture]] = {
    name: (family, architecture) for family in FAMILIES.values() for name, architecture in family.gguf.items()
}
