"""A second backend for prompts, slow and plain: numpy over the package's decoded weights.

It shares nothing with the native engine but the keys and values it reads and writes and the rows of logits. Its sums
are rounded in another order, so its numerics is another.
"""

from __future__ import annotations

import numpy as np
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.predictor.thresholds import threshold_mask
from neuronpipe.plans.reference.attention import rms_norm, rotate
from neuronpipe.plans.reference.engine import Array, ReferenceEngine
from neuronpipe.plans.reference.weights import PackageWeights
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.steps.backend import Backend, Phase, Placement, StepWork
from neuronpipe.services.worker.prefill import PrefillService


class NumpyBackend:
    """One sequence in a step, mode exact or thresholded. off: what every logit is multiplied by, for a backend that is
    wrong."""

    numerics = "numpy-f32"

    def __init__(self, off: float = 1.0) -> None:
        self._off = np.float32(off)

    def supports(self, manifest: Manifest, phase: Phase) -> str | None:
        """Prompts only."""
        return (
            None
            if phase == "prefill" and manifest.model.experts == 1
            else "numpy computes prompts of dense models only"
        )

    def load(self, placement: Placement) -> None:
        """Map keys, values and logits; weights are decoded whenever they are used."""
        job, memory = placement.job, placement.memory
        self._model = m = job.package.manifest.model
        compute = job.plan.compute
        shape = (m.layers, compute.sequences, m.key_heads, 2, compute.context_tokens, m.head_width)
        self._kv = np.asarray(memory.view("kv", "kv")).view(np.float16).reshape(shape)
        self._logits = np.asarray(memory.view("exchange", "logits")).reshape(-1, m.vocabulary)
        mask = threshold_mask(job.package.manifest) if compute.mode == "thresholded" else None
        self._weights, self._engine = PackageWeights(job.package), ReferenceEngine(job.package, mask=mask)

    def compute(self, work: StepWork) -> dict[str, float]:
        """A chunk of a prompt."""
        first, end, m = work.positions[0], work.positions[-1] + 1, self._model
        positions = np.arange(first, end)
        x = self._weights.matrix("embedding")[np.asarray(work.tokens)] * np.float32(m.embedding_scale)
        scale = np.float32(m.residual_scale)
        if m.positions == "learned":
            x = x + self._weights.vector("position_embedding").reshape(-1, m.width)[positions]
        for layer in range(m.layers):
            normed = self._engine._normed(f"layers.{layer}.attention_norm", x)
            attended = x + scale * self._attention(layer, work.sequences[0], normed, positions)
            residual = x if m.parallel else attended
            inputs = normed, residual, self._engine._normed(f"layers.{layer}.ffn_norm", residual)
            x = attended + scale * self._engine._feed_forward(layer, 0, inputs, np.arange(len(x)))[0]
        wanted = slice(work.logits_first, work.logits_first + work.logits_count)
        self._logits[: work.logits_count] = self._engine.logits(x[wanted]) * self._off
        return {}

    def give_back(self) -> None:
        pass

    def close(self) -> None:
        """Nothing is held but mappings."""
        del self._kv, self._logits

    def _attention(self, layer: int, sequence: int, normed: Array, positions: np.ndarray) -> Array:
        m, weights, name = self._model, self._weights, f"layers.{layer}"
        qkv = normed @ weights.matrix(f"{name}.qkv").T
        if m.qkv_bias:
            qkv = qkv + weights.vector(f"{name}.qkv.bias")
        queries, keys, values = np.split(
            qkv.reshape(len(normed), -1, m.head_width), (m.query_heads, m.query_heads + m.key_heads), axis=1
        )
        own = self._kv[layer, sequence]
        own[:, 0, positions] = self._placed(f"{name}.key_norm", keys, positions).swapaxes(0, 1)
        own[:, 1, positions] = values.swapaxes(0, 1)
        past = own[:, :, : positions[-1] + 1].astype(np.float32)
        distance = positions[:, None] - np.arange(positions[-1] + 1)
        window = m.windows_tokens[layer]
        seen = (distance >= 0) & ((distance < window) if window else True)
        queries = self._placed(f"{name}.query_norm", queries, positions) * np.float32(m.attention_scale)
        mixed = np.empty_like(queries)
        for head in range(m.query_heads):
            head_keys, head_values = past[head * m.key_heads // m.query_heads]
            scores = queries[:, head] @ head_keys.T / np.float32(np.sqrt(m.head_width))
            shares = np.exp(np.where(seen, scores - scores.max(axis=1, keepdims=True), -np.inf))
            mixed[:, head] = shares / shares.sum(axis=1, keepdims=True) @ head_values
        attention: Array = mixed.reshape(len(normed), -1) @ weights.matrix(f"{name}.attention_output").T
        return attention + weights.vector(f"{name}.attention_output.bias") if m.output_bias else attention

    def _placed(self, norm: str, heads: Array, positions: np.ndarray) -> Array:
        m = self._model
        if m.head_norm:
            heads = rms_norm(heads, self._weights.vector(norm), m.norm_epsilon)
        if m.positions != "rotary":
            return heads
        angles = positions[:, None].astype(np.float32) * self._weights.vector("rope.inverse_frequency")
        return rotate(heads, angles)


class NumpyPrefill(PrefillService):
    """Prompts by numpy."""

    def backend(self, job: Job) -> Backend:
        """Instead of the one in the plan."""
        return NumpyBackend()


class WrongPrefill(PrefillService):
    """Says that its numerics is another, and computes something else."""

    def backend(self, job: Job) -> Backend:
        """Every logit a third larger."""
        return NumpyBackend(off=4 / 3)
