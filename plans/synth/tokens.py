"""The vocabulary: every token is a moment of a preset's trajectory, and its name says which."""

from __future__ import annotations

import numpy as np
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.manifest import Workload
from neuronpipe.plans.synth.shapes import Coordinates, rank_of
from neuronpipe.plans.synth.trajectory import PRESETS, trajectory
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers

# Shares of a token's squared length; the rest comes from the layers.
STATE_POWER, STEADY_POWER, IDENTITY_POWER = 0.55, 0.25, 0.2
# The state's spectrum: exp(-j / decay) over its coordinates and an even rest that no low rank can hold.
DECAYS_PER_RANK = 8
EVEN_SHARE = 0.005


def workload(model: ModelSpec, seed: int) -> Workload:
    """Every preset has an equal part of the vocabulary."""
    tokens = model.vocabulary // len(PRESETS)
    return Workload(seed, {name: (number * tokens, tokens) for number, name in enumerate(PRESETS)})


def tokenizer_json(work: Workload, vocabulary: int) -> bytes:
    """tokenizer.json: words `default0`, `default1`, ... between spaces. An unknown word is the first token."""
    names = {f"unused{token}": token for token in range(vocabulary)}
    for preset, (first, count) in work.presets.items():
        for number in range(count):
            del names[f"unused{first + number}"]
            names[f"{preset}{number}"] = first + number
    unknown = min(names, key=lambda name: names[name])
    tokenizer = Tokenizer(models.WordLevel(names, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return str(tokenizer.to_str()).encode()


def spectrum(width: int, places: Coordinates) -> NDArray[np.float32]:
    """Variance of each coordinate of the state, together STATE_POWER * width."""
    number = np.arange(places.state_width)
    falling = np.exp(-number * DECAYS_PER_RANK / rank_of(width))
    shares = (1 - EVEN_SHARE) * falling / falling.sum() + EVEN_SHARE / places.state_width
    return np.asarray(STATE_POWER * width * shares, dtype=np.float32)


def embeddings(
    model: ModelSpec, places: Coordinates, work: Workload, random: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Embedding and output rows [vocabulary, width]. Output row k+1 holds the code of token k, the last of a preset
    leads to its first: greedy decoding walks the trajectory."""
    identity_width = places.identity.stop - places.identity.start
    table = np.zeros((model.vocabulary, model.width), dtype=np.float32)
    output = np.zeros_like(table)
    table[:, places.steady] = np.sqrt(STEADY_POWER * model.width / (places.steady.stop - places.steady.start))
    codes = random.choice(np.array([-1, 1], dtype=np.float32), (model.vocabulary, identity_width))
    table[:, places.identity] = codes * np.sqrt(IDENTITY_POWER * model.width / identity_width)
    deviation = np.sqrt(spectrum(model.width, places))
    output[:, places.identity] = codes
    for name, (first, count) in work.presets.items():
        table[first : first + count, places.state] = (
            trajectory(PRESETS[name], count, places.state_width, random) * deviation
        )
        output[first : first + count, places.identity] = np.roll(codes[first : first + count], 1, axis=0)
    return table, output * np.float32(0.1)
