"""Conversion of a recording to a profile: frequencies of neurons and experts, reuse, curve, misses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from neuronpipe.plans.activity.expert_prediction import guessed_experts
from neuronpipe.plans.activity.miss_curves import miss_curves
from neuronpipe.plans.activity.recording import Recording
from neuronpipe.plans.package.activity_profile import (
    ALWAYS,
    BATCHES,
    EDGES,
    ActivityProfile,
    Points,
    ProfileMode,
    neuron_bin_ends,
)
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

SHOWN_DIGITS = 6
Progress = Callable[[int, int], None]


@dataclass
class Frequencies:
    """Frequencies of a profile in activity.bin: shares 0..1 of the batches of a text.

    experts: [batch sizes, feed-forwards]
    neurons: [batch sizes, feed-forwards, neurons]
    """

    experts: NDArray[np.float32]
    neurons: NDArray[np.float32]

    def to_bytes(self, bins: NDArray[np.float32]) -> tuple[bytes, bytes]:
        """Return the stored bytes: those of experts and bins, and those of neurons. bins: as `binned` returns them."""
        return _stored(self.experts) + _stored(bins), _stored(self.neurons)


def _stored(shares: NDArray[np.float32]) -> bytes:
    return np.round(shares * ALWAYS).astype("<u2").tobytes()


def hottest_first(neurons: NDArray[np.float32]) -> NDArray[np.intp]:
    """Return the numbers of a feed-forward's neurons by descending frequency in the smallest batch; among equals, in
    the largest batch.

    neurons: frequencies [batch sizes, neurons]
    """
    return np.lexsort((-neurons[-1], -neurons[0]))


def binned(manifest: Manifest, neurons: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the mean frequencies between EDGES, [batch sizes, feed-forwards, bins].

    Neurons are in the package's order if that is by frequency, else hottest first. An empty bin has the frequency of
    the neuron at its start.

    neurons: frequencies [batch sizes, feed-forwards, neurons]
    """
    ends = neuron_bin_ends(manifest.model.neurons)
    ordered = manifest.layout.neuron_order == "frequency"
    bins = np.empty((*neurons.shape[:-1], len(EDGES) - 1), np.float32)
    for ffn in range(neurons.shape[1]):
        frequencies = neurons[:, ffn]
        frequencies = frequencies if ordered else frequencies[:, hottest_first(frequencies)]
        for number, start in enumerate(ends[:-1]):
            first = min(start, frequencies.shape[1] - 1)
            bins[:, ffn, number] = frequencies[:, first : max(first + 1, ends[number + 1])].mean(axis=1)
    return bins


def curve(bins: NDArray[np.float32], neurons: int) -> Points:
    """Return points of (share of the neurons, hottest first; their share of a token's accesses).

    bins: the result of `binned`; feed-forwards are weighted by their accesses
    neurons: number of neurons of a feed-forward
    """
    ends = np.array(neuron_bin_ends(neurons))
    accesses = (bins[0].astype(np.float64) * np.diff(ends)).sum(axis=0)
    total = accesses.sum()
    shares = np.cumsum(accesses) / total if total else ends[1:] / neurons
    points = {0.0: 0.0}
    points |= dict(
        zip((ends[1:] / neurons).round(SHOWN_DIGITS).tolist(), shares.round(SHOWN_DIGITS).tolist(), strict=True)
    )
    return tuple((points | {1.0: 1.0}).items())


@frozen
class MeasuredProfile:
    """A profile, its frequencies, and for each layer the share of neurons that fire, and whose trigger fires."""

    profile: ActivityProfile
    frequencies: Frequencies
    fired_by_layer: tuple[float, ...]
    trigger_fired_by_layer: tuple[float, ...]


def measure(
    manifest: Manifest, recording: Recording, mode: ProfileMode, text: str, progress: Progress = lambda done, all_: None
) -> MeasuredProfile:
    """Return the profile of a recording.

    progress: receives the work that is done, and all work
    """
    model, count = manifest.model, len(recording.tokens)
    frequencies = Frequencies(
        np.zeros((len(BATCHES), model.ffns), np.float32),
        np.zeros((len(BATCHES), model.ffns, model.neurons), np.float32),
    )
    continued, wanted_by_layer, reuse_by_layer = recording.continued(), [], []
    for layer in range(model.layers):
        reused = continued_accesses = accesses = 0
        for expert, ffn in enumerate(model.ffns_of(layer)):
            bits = recording.accessed_bits(layer, expert)
            for number, batch in enumerate(BATCHES):
                union = _union(bits, batch)
                neurons = np.unpackbits(union, axis=1, count=model.neurons, bitorder="little")
                frequencies.neurons[number, ffn] = neurons.mean(axis=0, dtype=np.float64)
            accesses += int(np.bitwise_count(bits).sum())
            continued_accesses += int(np.bitwise_count(bits[continued]).sum())
            reused += int(np.bitwise_count((bits[1:] & bits[:-1])[continued[1:]]).sum())
            progress(ffn, 2 * model.ffns)
        for number, batch in enumerate(BATCHES):
            of_layer = _experts(recording.tokens["expert"][:, layer], model.expert_counts[layer], batch)
            frequencies.experts[number, model.ffns_of(layer)] = of_layer
        wanted_by_layer.append(accesses / max(count * model.active_experts(layer) * model.neurons, 1))
        reuse_by_layer.append(reused / continued_accesses if continued_accesses else 0.0)
    bins = binned(manifest, frequencies.neurons)
    misses = miss_curves(
        manifest,
        recording,
        frequencies.neurons[0],
        mode,
        lambda done, all_: progress(model.ffns + done * model.ffns // all_, 2 * model.ffns),
    )
    predicted = guessed_experts(recording.tokens["expert"], model.most_experts) if model.experts > 1 else ((), ())
    profile = ActivityProfile(
        mode=mode,
        source="measured",
        text=text,
        tokens=count,
        curve=curve(bins, model.neurons),
        wanted_by_layer=_rounded(wanted_by_layer),
        reuse_by_layer=_rounded(reuse_by_layer),
        misses=misses,
        experts_by_frequency=_rounded(predicted[0]),
        experts_by_layer_before=_rounded(predicted[1]),
    )
    # A layer without a feed-forward has no neurons, of which none is active.
    active_neurons = [max(model.active_experts(layer) * model.neurons, 1) for layer in range(model.layers)]
    shares = [
        _rounded(recording.tokens[name].sum(axis=(0, 2)) / (count * np.array(active_neurons)))
        for name in ("active", "fired")
    ]
    return MeasuredProfile(profile, frequencies, shares[0], shares[1])


def _rounded(values: Sequence[float] | NDArray[np.float64]) -> tuple[float, ...]:
    return tuple(round(float(value), SHOWN_DIGITS) for value in values)


def _parts(values: NDArray[np.generic], batch: int) -> NDArray[np.generic]:
    """Return values [tokens, ...] as [batch, tokens of a part, ...]. The parts of the text stand for sequences that are
    decoded together: neighbouring tokens would share more accesses than independent sequences do."""
    part_tokens = len(values) // batch
    return values[: part_tokens * batch].reshape(batch, part_tokens, *values.shape[1:])


def _union(bits: NDArray[np.uint8], batch: int) -> NDArray[np.uint8]:
    return np.asarray(np.bitwise_or.reduce(_parts(bits, batch), axis=0))


def _experts(chosen: NDArray[np.int32], experts: int, batch: int) -> NDArray[np.float64]:
    """Return the share of batches that each expert computes.

    chosen: numbers of the experts of each token [tokens, experts per token]
    """
    hits = (chosen[:, :, None] == np.arange(experts)).any(axis=1)
    return np.asarray(np.logical_or.reduce(_parts(hits, batch), axis=0).mean(axis=0))
