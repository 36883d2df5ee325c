"""The vocabulary: every token is a moment of a preset's trajectory, and its name says which."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from neuronpipe.plans.convert.quantize import encode
from neuronpipe.plans.lab.synth import codes
from neuronpipe.plans.lab.synth.shapes import Coordinates, rank_of
from neuronpipe.plans.lab.synth.trajectory import PRESETS, stretches
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.manifest import Workload
from neuronpipe.plans.package.writer import Rows
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray
from tokenizers import Tokenizer, models, pre_tokenizers

# Shares of a token's squared length; the rest comes from the layers.
STATE_POWER, STEADY_POWER, IDENTITY_POWER = 0.55, 0.25, 0.2
# The state's spectrum: exp(-j / decay) over its coordinates and an even rest that no low rank can hold.
DECAYS_PER_RANK = 8
EVEN_SHARE = 0.005
OUTPUT_SIZE = 0.1  # of an output row's weights
TEXT_TOKENS = 96
INDEPENDENT_TEXTS = 4  # beside one of every other preset
HELD_OUT_PART = 4


@frozen
class Texts:
    """The calibration tokens, as every layer sees them: texts of one length one behind the other. independent: those
    whose states are independent; their statistics are those of every preset over all contexts. held_out: which the
    predictor is judged on, bool [tokens]."""

    ids: tuple[range, ...]
    independent: slice
    held_out: NDArray[np.bool_]


def workload(model: ModelSpec, seed: int) -> Workload:
    """Every preset has an equal part of the vocabulary."""
    tokens = model.vocabulary // len(PRESETS)
    return Workload(seed, {name: (number * tokens, tokens) for number, name in enumerate(PRESETS)})


def calibration_texts(work: Workload) -> Texts:
    """Texts of one length: one of each preset, the last, independent one, several."""
    tokens = min(TEXT_TOKENS, min(count for _, count in work.presets.values()) // INDEPENDENT_TEXTS)
    firsts = [first for first, _ in work.presets.values()]
    firsts += [firsts[-1] + number * tokens for number in range(1, INDEPENDENT_TEXTS)]
    ids = tuple(range(first, first + tokens) for first in firsts)
    held_out = np.tile(np.arange(tokens) >= tokens - tokens // HELD_OUT_PART, len(ids))
    return Texts(ids, slice(len(held_out) - INDEPENDENT_TEXTS * tokens, len(held_out)), held_out)


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


class Tables(NamedTuple):
    """Rows of the embedding and of the output for some tokens in a row."""

    embedding: Rows
    output: Rows


def preset_tables(model: ModelSpec, places: Coordinates, name: str, count: int, random: np.random.Generator) -> Tables:
    """The rows of a preset's `count` tokens. Output row k+1 holds the code of token k, the last leads to the first:
    greedy decoding walks the trajectory."""
    embedding, output = unused_tables(model, places, count)
    signs = codes.random_signs(count, places.identity.stop - places.identity.start, random)
    own, groups = codes.code_bytes(places.identity), codes.code_groups(places.identity)
    embedding.quants[:, own] = signs
    output.quants[:, own] = np.roll(signs, 1, axis=0)
    power = IDENTITY_POWER * model.width / (places.identity.stop - places.identity.start)
    embedding.scales.view("<f2")[:, groups] = np.sqrt(power) / codes.LARGEST
    output.scales.view("<f2")[:, groups] = OUTPUT_SIZE / codes.LARGEST
    deviation, start = np.sqrt(spectrum(model.width, places)), 0
    for states in stretches(PRESETS[name], count, places.state_width, random):
        rows, some = encode("q4", states * deviation), slice(start, start := start + len(states))
        embedding.quants[some, codes.code_bytes(places.state)] = rows.quants
        embedding.scales.view("<f2")[some, codes.code_groups(places.state)] = rows.scales.view("<f2")
    return Tables(embedding, output)


def unused_tables(model: ModelSpec, places: Coordinates, count: int) -> Tables:
    """The rows of tokens that belong to no preset: nothing but what every token has."""
    tables = Tables(*(codes.zero_rows(count, model.width) for _ in Tables._fields))
    power = STEADY_POWER * model.width / (places.steady.stop - places.steady.start)
    tables.embedding.quants[:, codes.code_bytes(places.steady)] = codes.ONES
    tables.embedding.scales.view("<f2")[:, codes.code_groups(places.steady)] = np.sqrt(power)
    return tables
