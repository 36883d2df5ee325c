"""Bytes that a step reads from memory: fixed tensors, keys and values, and rows of neurons."""

from __future__ import annotations

from neuronpipe.plans.cost.activation_rates import ActivationRates
from neuronpipe.plans.cost.expected_misses import accessed_by_any
from neuronpipe.plans.package.layout import row_bytes
from neuronpipe.plans.package.manifest import PREDICTOR, Manifest
from neuronpipe.plans.package.traffic import neuron_row_bytes, trigger_row_bytes
from neuronpipe.plans.plan.document import Compute, Memory
from neuronpipe.plans.plan.offloaded_blocks import matrix_bytes
from neuronpipe.plans.plan.segment_sizes import STATE_ELEMENT_BYTES, embedding_flash_bytes
from neuronpipe.protocol.frozen import frozen


@frozen
class StepBytes:
    """The bytes that steps with one plan read from memory. `tokens` are those of the step, unless stated otherwise."""

    manifest: Manifest
    rates: ActivationRates
    compute: Compute
    memory: Memory

    def fixed(self, tokens: int) -> int:
        """Return the bytes of fixed tensors. A predictor counts with the share of the experts that are chosen."""
        manifest, total = self.manifest, self.memory.fixed_bytes
        if not manifest.model.tied_embeddings:  # a token reads one row of the embedding
            model = manifest.model
            total -= model.vocabulary * row_bytes(manifest.quantization_of("embedding"), model.width)
        if self.compute.embedding_on_flash:
            total += embedding_flash_bytes(manifest)
        return total - (self._all_predictors - self.predictor(tokens))

    @property
    def _all_predictors(self) -> int:
        used = self.compute.mode == "predicted" and PREDICTOR in self.manifest.files
        return self.manifest.files[PREDICTOR].bytes if used else 0

    def predictor(self, tokens: int) -> int:
        """Return the bytes of the predictor, which are part of `fixed`."""
        skipped_share = 1 - accessed_by_any(self.manifest, self.rates, 1.0, tokens)
        return self._all_predictors - int(self._all_predictors * skipped_share)

    def output(self) -> int:
        """Return the bytes of the output matrix, which are part of `fixed`."""
        return matrix_bytes(self.manifest, "output")

    def offloaded(self) -> int:
        """Return the bytes of the offloaded matrices, which the workers do not read."""
        return sum(
            matrix_bytes(self.manifest, name) * (1 if name == "output" else self.manifest.model.layers)
            for name in self.compute.held_matrices
        )

    def kv(self, tokens: int) -> int:
        """Return the bytes of one sequence's keys and values in all layers, each within its attention window, and of
        its recurrent states, which are read and written.

        tokens: length of the sequence
        """
        model = self.manifest.model
        groups = model.cached_vectors_in_windows.items()
        elements = sum(
            layers * vectors.elements * min(tokens, window or tokens) for (vectors, window), layers in groups
        )
        return row_bytes(self.compute.kv_type, elements) + 2 * STATE_ELEMENT_BYTES * model.all_state_elements

    def trigger_rows(self, tokens: int) -> float:
        """Return the bytes of the trigger rows that the tokens read. A row counts for each token, up to all rows."""
        return self._rows(tokens, self.rates.trigger_read) * trigger_row_bytes(self.manifest)

    def value_rows(self, tokens: int) -> float:
        """Return the bytes of the Up and Down rows that the tokens read, counted as trigger rows are."""
        up = self._rows(tokens, self.rates.value_read) if self.manifest.model.gated else 0.0
        return (up + self._rows(tokens, self.rates.down_read)) * neuron_row_bytes(self.manifest)

    def _rows(self, tokens: int, share: float) -> float:
        """Return the rows of one matrix that the tokens read, each this share of its chosen experts' neurons."""
        model = self.manifest.model
        if share == 1.0:
            read = accessed_by_any(self.manifest, self.rates, 1.0, tokens)
        else:
            read = min(1.0, tokens * self.rates.chosen * share)
        return read * model.ffns * model.neurons
