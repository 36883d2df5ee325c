"""The vocabulary of a synthetic package: every token is a time step of a preset's trajectory."""

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

# Shares of the squared length of a token's embedding.
STATE_POWER, STEADY_POWER, IDENTITY_POWER = 0.55, 0.25, 0.2
# The state's spectrum falls exponentially over its coordinates, plus an even part that no low rank can express. With an
# even spectrum alone, low-rank predictors would be useless. With this spectrum rank 352 has the published quality:
# recall 0.95 to 0.98 at 1.1 to 1.5 predicted neurons per active neuron.
DECAYS_PER_RANK = 8
EVEN_SHARE = 0.005
OUTPUT_SIZE = 0.1  # magnitude of an output row's weights
SEQUENCE_TOKENS = 96
INDEPENDENT_SEQUENCES = 4  # of the independent preset; other presets have one sequence
HELD_OUT_PART = 4
CHARACTERS = sorted({*"0123456789unused", *"".join(PRESETS)})  # all that names consist of


@frozen
class CalibrationSequences:
    """The calibration tokens: sequences of equal length, concatenated.

    ids: token ids of each sequence
    independent: range of the tokens with independent states; any preset has their statistics over many contexts
    held_out: mask of the tokens on which predictors are evaluated
    """

    ids: tuple[range, ...]
    independent: slice
    held_out: NDArray[np.bool_]


def workload(model: ModelSpec, seed: int) -> Workload:
    """Return the workload of a package: each preset has an equal part of the vocabulary."""
    tokens = model.vocabulary // len(PRESETS)
    return Workload(seed, {name: (number * tokens, tokens) for number, name in enumerate(PRESETS)})


def calibration_sequences(work: Workload) -> CalibrationSequences:
    """Return the start of each preset as a sequence, and further sequences of the last preset, the independent one."""
    tokens = min(SEQUENCE_TOKENS, min(count for _, count in work.presets.values()) // INDEPENDENT_SEQUENCES)
    firsts = [first for first, _ in work.presets.values()]
    firsts += [firsts[-1] + number * tokens for number in range(1, INDEPENDENT_SEQUENCES)]
    ids = tuple(range(first, first + tokens) for first in firsts)
    held_out = np.tile(np.arange(tokens) >= tokens - tokens // HELD_OUT_PART, len(ids))
    return CalibrationSequences(ids, slice(len(held_out) - INDEPENDENT_SEQUENCES * tokens, len(held_out)), held_out)


def tokenizer_json(work: Workload, vocabulary: int) -> bytes:
    """Return the content of tokenizer.json: words `default0`, `default1` and so on between spaces. The last tokens are
    the CHARACTERS, of which an unknown word consists; other characters of it are the first token."""
    names = [f"unused{token}" for token in range(vocabulary)]
    for preset, (first, count) in work.presets.items():
        names[first : first + count] = [f"{preset}{number}" for number in range(count)]
    names[-len(CHARACTERS) :] = CHARACTERS
    # A byte-pair encoding that takes whole words, because it takes as little memory as those of real models.
    ids = {name: token for token, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(ids, [], unk_token=names[0], fuse_unk=True, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return str(tokenizer.to_str()).encode()


def spectrum(width: int, places: Coordinates) -> NDArray[np.float32]:
    """Return the variance of each coordinate of the state; their sum is STATE_POWER * width."""
    number = np.arange(places.state_width)
    falling = np.exp(-number * DECAYS_PER_RANK / rank_of(width))
    shares = (1 - EVEN_SHARE) * falling / falling.sum() + EVEN_SHARE / places.state_width
    return np.asarray(STATE_POWER * width * shares, dtype=np.float32)


class Tables(NamedTuple):
    """Rows of the embedding and of the output matrix for a range of tokens."""

    embedding: Rows
    output: Rows


def preset_tables(model: ModelSpec, places: Coordinates, name: str, count: int, random: np.random.Generator) -> Tables:
    """Return the rows of a preset's `count` tokens. Output row k + 1 has the code of token k, and the first row that of
    the last token, so that greedy decoding follows the trajectory."""
    embedding, output = unused_tables(model, places, count)
    signs = codes.random_signs(count, places.identity.stop - places.identity.start, random)
    code_columns, groups = codes.code_bytes(places.identity), codes.code_groups(places.identity)
    embedding.quants[:, code_columns] = signs
    output.quants[:, code_columns] = np.roll(signs, 1, axis=0)
    power = IDENTITY_POWER * model.width / (places.identity.stop - places.identity.start)
    embedding.scales.view("<f2")[:, groups] = np.sqrt(power) / codes.LARGEST
    output.scales.view("<f2")[:, groups] = OUTPUT_SIZE / codes.LARGEST
    deviation, start = np.sqrt(spectrum(model.width, places)), 0
    for states in stretches(PRESETS[name], count, places.state_width, random):
        rows, places_of_rows = encode("q4", states * deviation), slice(start, start := start + len(states))
        embedding.quants[places_of_rows, codes.code_bytes(places.state)] = rows.quants
        embedding.scales.view("<f2")[places_of_rows, codes.code_groups(places.state)] = rows.scales.view("<f2")
    return Tables(embedding, output)


def unused_tables(model: ModelSpec, places: Coordinates, count: int) -> Tables:
    """Return the rows of tokens that belong to no preset: only the steady coordinates of embeddings are not 0."""
    tables = Tables(*(codes.zero_rows(count, model.width) for _ in Tables._fields))
    power = STEADY_POWER * model.width / (places.steady.stop - places.steady.start)
    tables.embedding.quants[:, codes.code_bytes(places.steady)] = codes.ONE_PAIRS
    tables.embedding.scales.view("<f2")[:, codes.code_groups(places.steady)] = np.sqrt(power)
    return tables
