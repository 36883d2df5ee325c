"""The prefill backend `onnx`: the runtime of a neural processor computes the matrix products of prompts, and the native
engine everything else.

The backend's option is the provider (providers.py). The numerics name both: the arithmetic of the products, and that of
the engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.plan.segment_sizes import RunShape, private_layouts, product_blocks
from neuronpipe.protocol.memory.layout import Layout
from neuronpipe.services.offload.npu.graph_files import contexts_for
from neuronpipe.services.offload.npu.providers import provider_of
from neuronpipe.services.offload.npu.sessions import Runtime, Session
from neuronpipe.services.runtime.job import Job
from neuronpipe.services.steps.backend import Phase, Placement, StepWork
from neuronpipe.services.worker.cpu import CpuBackend
from neuronpipe.services.worker.participant import EngineConfig, View

if TYPE_CHECKING:
    from neuronpipe.services.offload.npu.graphs import Graph

ACTIVATIONS = ("relu", "drelu")
"""Activation functions with which scaling the input only scales a neuron's value, so that each token may have its own
scale."""


class OnnxBackend(CpuBackend):
    """The prefill backend `onnx`; the interface is that of services/steps/backend.py."""

    drafts = False

    def __init__(self, options: str = "") -> None:
        super().__init__()
        self._provider = provider_of(options)

    @property
    def numerics(self) -> str:
        """The numerics of the provider's products, followed by those of the engine."""
        return f"{self._provider.numerics}+{super().numerics}"

    def supports(self, manifest: Manifest, phase: Phase) -> str | None:
        if phase != "prefill":
            return "onnx computes prompts, or blocks of decode steps; write prefill=onnx:... or accelerator=onnx:..."
        return refusal(manifest)

    def load(self, placement: Placement) -> None:
        """Build the engines, and the sessions of the graphs that the plan's chunks need."""
        import numpy as np
        from neuronpipe.services.offload.npu.layer_products import Products

        manifest, tokens = placement.job.package.manifest, self._max_tokens(placement)
        model = manifest.model
        self._inputs = np.zeros((tokens, max(model.width, model.query_width)), np.float32)
        self._outputs = np.zeros((tokens, max(model.qkv_rows, model.width)), np.float32)
        super().load(placement)
        neurons = self._product_blocks(placement) * manifest.layout.block_neurons
        self._products = Products(
            manifest,
            self._sessions(placement.job.package, neurons),
            neurons=neurons,
            max_tokens=tokens,
            threads=placement.job.plan.compute.prefill_threads,
        )
        self.multiply = self._products

    def compute(self, work: StepWork) -> dict[str, float]:
        counters, products = super().compute(work), self._products.counters()
        # Flash reads for which no graph waited were hidden behind computation.
        exposed_ms = min(counters["flash_ms"], products["rows_wait_ms"] / len(self._participants))
        return counters | products | {"flash_ms": exposed_ms}

    def _sessions(self, package: Package, neurons: int) -> Callable[[Graph], Session]:
        """Return a function that opens sessions from the package's contexts for the chip if any, else from graphs."""
        runtime, chip = Runtime(self._provider), self._provider.chip
        if chip is None:
            return runtime.session
        contexts = contexts_for(package.path, package.manifest, chip, neurons, runtime.qnn_version())
        return runtime.session if contexts is None else runtime.prepared(contexts)

    def _own_stage(self, job: Job) -> Layout:
        return private_layouts(job.package.manifest, job.plan)["prefill_stage"]

    def _engine_config(self, placement: Placement, stage: Layout) -> EngineConfig:
        config = super()._engine_config(placement, stage)
        return dataclasses.replace(
            config, external_products=True, product_blocks=self._product_blocks(placement), predicts=False
        )

    def _view(self, placement: Placement, window: int, number: int) -> View:
        view = super()._view(placement, window, number)
        return dataclasses.replace(view, inputs=self._inputs, outputs=self._outputs)

    def _product_blocks(self, placement: Placement) -> int:
        layout = placement.job.package.manifest.layout
        return product_blocks(layout, placement.job.plan.compute.prefill_window_blocks)

    def _max_tokens(self, placement: Placement) -> int:
        compute = placement.job.plan.compute
        return RunShape.of(compute).prefill_tokens(compute.prefill_chunk_tokens)


def refusal(manifest: Manifest) -> str | None:
    """Return a sentence why the graphs cannot compute the layers of this model, or None if they can."""
    model = manifest.model
    if not model.gated or model.ffn_bias or model.activation not in ACTIVATIONS or model.activation_threshold:
        kind = f"{model.activation}{'' if model.gated else ' without a gate'}"
        return f"onnx needs a gate and one of {', '.join(ACTIVATIONS)} without a threshold; this model has {kind}"
    if model.router_bias or model.attention_sinks:
        return "onnx computes neither routers with biases nor attention sinks; this model has them"
    if model.all_state_elements or model.gated_attention:
        return "onnx computes neither recurrent layers, draft layers nor gated attention; this model has them"
    if model.latent_width:
        return "onnx does not compute attention with latents, which this model has"
    if model.do_heads_differ or model.value_norm:
        return "onnx computes neither norms of values nor heads that differ between layers; this model has them"
    if model.norms_after or model.score_cap or model.logit_cap or any(model.local_layers):
        return "onnx computes neither norms of outputs, caps nor two tables of positions; this model has them"
    if manifest.quantization == "f16":
        return "onnx needs a package in q8 or q4; this one is f16"
    return None
