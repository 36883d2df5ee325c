"""Write defaults.json: what transformers' configuration classes fill in. python defaults.py (from this directory, with
transformers installed; PyTorch is not needed)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import transformers


def defaults(owner: type) -> dict[str, object]:
    """The fields of a configuration class by name. rope_theta is a default of the class above all of them."""
    values = {
        field.name: field.default
        for field in dataclasses.fields(owner)
        if not field.name.startswith("_") or field.name == "_remove_final_layer_norm"
    }
    plain = {name: value for name, value in values.items() if isinstance(value, str | int | float | None)}
    theta = owner.default_theta
    local = {"rope_local_base_freq": theta["local"]} if isinstance(theta, dict) else {}
    # Fields that the class knows by another name, which its files have.
    plain |= {name: plain[field] for field, name in owner.attribute_map.items() if field in plain}
    table = {**plain, "rope_theta": theta["global"] if local else theta, **local}
    rope = owner().rope_parameters or {} if "rope_parameters" in values else {}
    share = rope.get("partial_rotary_factor")  # some classes set it in __post_init__
    return table if share is None else {**table, "partial_rotary_factor": share}


def main() -> None:
    """Write the file beside this one."""
    owners = (
        transformers.LlamaConfig,
        transformers.MistralConfig,
        transformers.Qwen2Config,
        transformers.Qwen3Config,
        transformers.Qwen2VLTextConfig,
        transformers.Qwen2_5_VLTextConfig,
        transformers.Qwen3VLTextConfig,
        transformers.Qwen3VLMoeTextConfig,
        transformers.MixtralConfig,
        transformers.Qwen3MoeConfig,
        transformers.OPTConfig,
        transformers.NemotronConfig,
        transformers.FalconConfig,
        transformers.ArceeConfig,
        transformers.GptOssConfig,
        transformers.SmolLM3Config,
        transformers.GraniteConfig,
        transformers.Phi3Config,
        transformers.Glm4MoeConfig,
        transformers.Qwen2MoeConfig,
        transformers.OlmoeConfig,
        transformers.OlmoConfig,
        transformers.Ministral3Config,
        transformers.Ernie4_5Config,
        transformers.Ernie4_5_MoeConfig,
        transformers.Exaone4Config,
        transformers.Dots1Config,
        transformers.HunYuanDenseV1Config,
        transformers.HunYuanMoEV1Config,
        transformers.SeedOssConfig,
        transformers.MiniMaxM2Config,
        transformers.PhimoeConfig,
        transformers.GraniteMoeConfig,
        transformers.DeepseekV2Config,
        transformers.DeepseekV3Config,
        transformers.Glm4MoeLiteConfig,
        transformers.Gemma2Config,
        transformers.Gemma3TextConfig,
        transformers.Gemma4TextConfig,
        transformers.Olmo2Config,
        transformers.Olmo3Config,
        transformers.StableLmConfig,
        transformers.CohereConfig,
        transformers.Cohere2Config,
        transformers.GPTNeoXConfig,
        transformers.Starcoder2Config,
        transformers.KimiLinearConfig,
    )
    table = {"transformers": transformers.__version__, **{owner.__name__: defaults(owner) for owner in owners}}
    Path(__file__).with_name("defaults.json").write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
