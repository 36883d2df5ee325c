"""Costs of work on a device: milliseconds for bytes, rows and reads.

They come from a device profile, which has measured the run's own kernels. Without one they come from the speed of
memory, with which computing is assumed to keep up. A cost is None if neither was measured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

from neuronpipe.plans.device.device import FlashCurve, MemorySpeed
from neuronpipe.plans.device.measured_points import DecodeKind
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.package.layout import (
    BLOCK_WEIGHTS,
    CODEBOOK_QUANTIZATIONS,
    MINIMUM_QUANTIZATIONS,
    Quantization,
    row_bytes,
)
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import KvType, Mode
from neuronpipe.protocol.frozen import frozen

# Assumed processor time of the loader: to submit and reap a read, and to check and copy its bytes.
ASSUMED_READ_US = 6.0
ASSUMED_READ_US_PER_KIB = 0.15
# Assumed of a run if only kernels were measured: time of a step relative to its kernels, with several workers and with
# one (measured: 1.10 to 1.39 on three machines); processor time to submit and reap a read relative to one in a large
# group (by the speeds of runs of four packages with the loader on a worker's core); and the delay of a read.
ASSUMED_STEP_FACTOR, ASSUMED_STEP_FACTOR_OF_ONE = 1.3, 1.1
ASSUMED_READ_FACTOR, ASSUMED_READ_DELAY_US = 1.5, 200.0
# Products of a prompt, tokens x weights, for each core: cores of a server were measured at 150 to 390 G
# (tests/bench/results, kernels), a phone's mid core would reach 48 G (plans/lab/devices).
ASSUMED_TOKEN_WEIGHTS_PER_S = 50e9
# Fixed cost of a panel, in tokens: an EPYC reaches 137, 257 and 321 G with 16, 64 and 512 tokens.
PANEL_TOKENS_OF_SETUP = 16
# Multiplications by keys and values in a prompt's attention, for each core, of which 78 G were measured with AVX-512.
ASSUMED_ATTENDED_PER_S = 20e9
# Time of a core for each gate of each token of a prompt, measured by perf with a 1B on an EPYC with AVX-512.
GATE_NS = 11.0
# The same where no gate is decided about and no token chooses experts: 3.6 to 5.6 on Zen 5, from prompts of 512 of four
# dense SiLU models in slices (tests/bench/results, models beside bench).
SLICE_GATE_NS = 5.0
BARRIERS_PER_LAYER = 6  # after queries, keys and values; attention; projection; blocks; sums; and between layers


@frozen
class WorkCost:
    """The costs of work by all decode workers together, with the matrices of one package.

    shares_core: the loader runs on a worker's core, so that its processor time delays the workers
    """

    manifest: Manifest
    mode: Mode
    workers: int
    shares_core: bool
    curve: FlashCurve | None
    speed: MemorySpeed | None
    profile: DeviceProfile | None = None
    kv_type: KvType = "f16"

    # ---- decode ----------------------------------------------------------------------------------------------
    def fixed_ms(self, size_bytes: float, matrix: str = "") -> float | None:
        """Return the time of products of fixed matrices, of which `size_bytes` are read.

        matrix: the only matrix that is read; "": all, each with its share of the bytes
        """
        only = ((self.manifest.quantization_of(matrix), 1.0),)
        return self._whole_rows_ms(size_bytes, only if matrix else self._fixed_shares.items())

    def triggers_ms(self, size_bytes: float) -> float | None:
        """Return the time of all trigger rows of blocks, read in order."""
        return self._in_order_ms("triggers", size_bytes, self._gate_rows)

    def values_ms(self, size_bytes: float, share: float, piece_bytes: int) -> float | None:
        """Return the time of the Up and Down rows of active neurons.

        share: share of the neurons that are active
        piece_bytes: bytes that are contiguous in memory, used if kernels were not measured

        Whole experts have rows as fixed matrices have them.
        """
        if self.manifest.layout.down_by_output:
            return self._whole_rows_ms(size_bytes, self._value_shares)
        if (each_s := self._values_s_per_byte(share, predicted=False)) is not None:
            return 1e3 * size_bytes * each_s
        return self._pieces_ms(size_bytes, piece_bytes)

    def predicted_ms(self, trigger_bytes: float, value_bytes: float, share: float, piece_bytes: int) -> float | None:
        """Return the time of the rows that a predictor chooses; `share` is its share of the neurons.

        Other parameters are as in `values_ms`.
        """
        triggers_ms = self._kernel_ms("predicted_triggers", trigger_bytes, share, self._gate_rows)
        if triggers_ms is not None and (each_s := self._values_s_per_byte(share, predicted=True)) is not None:
            return triggers_ms + 1e3 * value_bytes * each_s
        return self._pieces_ms(trigger_bytes + value_bytes, piece_bytes)

    def sequential_read_ms(self, size_bytes: float) -> float | None:
        """Return the time to read memory in order with hardly any computing, as for keys and values."""
        if self.profile is not None and self.profile.dram:
            return 1e3 * size_bytes / self.profile.dram_bytes_per_s(self.workers)
        if self.speed is None:
            return None
        return 1e3 * size_bytes / (self._share_of_speed(self.speed) * self.speed.sequential_bytes_per_s)

    def step_factor(self) -> float:
        """Return the time of a decode step relative to its kernels alone; 1 if no kernel was measured."""
        assumed = ASSUMED_STEP_FACTOR if self.workers > 1 else ASSUMED_STEP_FACTOR_OF_ONE
        measured = self._measured(lambda profile: profile.step_factor(self.mode, self.workers))
        return measured or (assumed if self._no_run_measured else 1.0)

    def synchronization_ms(self) -> float:
        """Return the time between two steps or, if no step was measured, of a step's barriers and messages.

        0 without a device profile.
        """
        if self.profile is None:
            return 0.0
        between_us = self._measured(lambda profile: profile.between_us(self.mode, self.workers))
        if between_us is not None:
            return between_us / 1e3
        barriers = BARRIERS_PER_LAYER * self.manifest.model.layers if self.workers > 1 else 0
        return (barriers * self.profile.barrier_us(self.workers) + self.profile.message_us(self.workers)) / 1e3

    # ---- prefill ---------------------------------------------------------------------------------------------
    def panel_ms(self, tokens: int, weights: float, of: Literal["mixers", "gates", "ups", "values"]) -> float:
        """Return the time to multiply weights by the vectors of `tokens` tokens.

        weights: number of weights
        of: matrices that have these weights
        """
        if of == "gates":
            return tokens * weights * self._panel_ms(tokens, self._gate_rows)
        if of == "ups":
            return tokens * weights * self._panel_ms(tokens, self._rows(self._value_shares[0][0]))
        parts = self._value_shares if of == "values" else self._mixer_shares.items()
        return tokens * weights * sum(part * self._panel_ms(tokens, self._rows(name)) for name, part in parts)

    def _panel_ms(self, tokens: int, rows: dict[str, Any]) -> float:
        """Return the time of a weight and a token in a panel of `tokens` tokens."""
        speed = self._measured(lambda profile: profile.panel_token_weights_per_s(tokens, self.workers, **rows))
        assumed = self.workers * ASSUMED_TOKEN_WEIGHTS_PER_S * tokens / (tokens + PANEL_TOKENS_OF_SETUP)
        return 1e3 / (speed or assumed)

    def reused_values_ms(self, token_weights: float, share: float) -> float:
        """Return the time of a prompt's value rows, which each token reads from the processor's cache.

        token_weights: weights of the rows, summed over the tokens
        share: share of the neurons that are active for a token
        """

        def seconds_per_weight(profile: DeviceProfile) -> float:
            of_up, of_down = (self._rows(quantization) for quantization, _ in self._value_shares)
            up = profile.reused_token_weights_per_s("ups", self.workers, share, **of_up)
            return 0.5 / up + 0.5 / profile.reused_token_weights_per_s("downs", self.workers, share, **of_down)

        each_s = self._measured(seconds_per_weight)
        return 1e3 * token_weights * (each_s or 1 / (self.workers * ASSUMED_TOKEN_WEIGHTS_PER_S))

    def reused_downs_ms(self, token_weights: float) -> float:
        """Return the time of a prompt's Down rows if all neurons are active for every token."""
        rows = self._rows(self._value_shares[1][0])
        speed = self._measured(lambda profile: profile.reused_token_weights_per_s("downs", self.workers, 1.0, **rows))
        return 1e3 * token_weights / (speed or self.workers * ASSUMED_TOKEN_WEIGHTS_PER_S)

    def attention_ms(self, products: float) -> float:
        """Return the time of a prompt's attention, whose keys and values the head before has left in the cache.

        products: components of keys and values that are multiplied, summed over heads and tokens
        """
        rows: dict[str, Any] = {"quantization": self.kv_type, "row_weights": self.manifest.model.cached_width}
        speed = self._measured(
            lambda profile: profile.reused_token_weights_per_s("attended", self.workers, 1.0, **rows)
        )
        return 1e3 * products / (speed or self.workers * ASSUMED_ATTENDED_PER_S)

    def gates_ms(self, gates: float) -> float:
        """Return the time to decide for each of `gates` products whether it is active, and to list active gates; in
        slices, where all are active, to compute the activation function."""
        in_slices = self.manifest.layout.down_by_output and self.manifest.model.experts == 1
        return gates * (SLICE_GATE_NS if in_slices else GATE_NS) / self.workers / 1e6

    # ---- flash -----------------------------------------------------------------------------------------------
    def flash_ms(self, reads: float, read_bytes: float, at_once: float, depth: int) -> float | None:
        """Return the time of the storage for these reads; None if flash was not measured.

        Reads are issued in groups, with nothing in flight between two groups. A group takes the time of one read alone,
        and for each further read the time that a read adds when as many are in flight.

        read_bytes: bytes of all reads
        at_once: reads of a group
        depth: maximum of reads in flight
        """
        if not reads:
            return 0.0
        if self.curve is None:
            return None
        size_bytes, at_once = max(1, int(read_bytes / reads)), max(1.0, at_once)
        first_ms = 1e3 * size_bytes / self.curve.bytes_per_s(size_bytes, 1)
        next_ms = 1e3 * size_bytes / self.curve.bytes_per_s(size_bytes, min(float(depth), at_once))
        return (first_ms + (at_once - 1) * next_ms) * reads / at_once

    def storage_ms(self, reads: float, read_bytes: float, at_once: float, depth: int) -> float | None:
        """Return the time of the storage, or that of the loader if it is longer, whether or not it shares its core.

        One process, the loader, submits, checks and copies all reads. Parameters and None are as in `flash_ms`.
        """
        flash_ms = self.flash_ms(reads, read_bytes, at_once, depth)
        if flash_ms is None or not reads:
            return flash_ms
        return max(flash_ms, reads * self._read_cpu_ms(read_bytes / reads, at_once, in_groups=True))

    def read_overhead_ms(self, reads: float, read_bytes: float, at_once: float) -> float:
        """Return the processor time of reads that delays the workers, spread over their cores.

        0 if the loader has a core of its own. Parameters are as in `flash_ms`.
        """
        return self.loader_ms(reads, read_bytes, at_once) / self.workers if self.shares_core else 0.0

    def loader_ms(self, reads: float, read_bytes: float, at_once: float) -> float:
        """Return the loader's processor time of reads. Parameters are as in `flash_ms`."""
        return reads * self._read_cpu_ms(read_bytes / reads, at_once) if reads else 0.0

    def stolen_ms(self, loader_ms: float, work_ms: float) -> float:
        """Return how much later the workers end their work of `work_ms`, if the loader, which runs first, has work of
        `loader_ms` on one of their cores meanwhile. 0 if the loader has a core of its own."""
        if not self.shares_core:
            return 0.0
        all_of_it = loader_ms / self.workers
        return all_of_it if self.workers == 1 else min(all_of_it, work_ms / (self.workers - 1))

    def read_service_ms(self, size_bytes: float, at_once: float, depth: int, *, in_groups: bool) -> float | None:
        """Return for how long a read among many occupies the slower of storage and loader; None if not measured.

        in_groups: the loader submits and completes large groups of reads, as when it was measured alone
        """
        if self.curve is None:
            return None
        flash_ms = 1e3 * size_bytes / self.curve.bytes_per_s(int(size_bytes), float(depth))
        return max(flash_ms, self._read_cpu_ms(size_bytes, at_once, in_groups=in_groups))

    def _read_cpu_ms(self, size_bytes: float, at_once: float, *, in_groups: bool = False) -> float:
        factor = 1.0
        if not in_groups:
            measured = self._measured(lambda profile: profile.read_factor(self.workers))
            factor = measured or (ASSUMED_READ_FACTOR if self._no_run_measured else 1.0)
        if self.profile is None or self.profile.flash is None or not self.profile.flash.costs:
            copied_us = ASSUMED_READ_US_PER_KIB * size_bytes / 1024  # the same in a run
            return (factor * self._assumed_submit_us() + copied_us) / 1e3
        return factor * self.profile.read_cpu_us(int(size_bytes), at_once) / 1e3

    def _assumed_submit_us(self) -> float:
        """Return the assumed processor time to submit and reap a read.

        It is at most the shortest time of a read in the measured curve, since one core submitted all of these reads.
        """
        if self.curve is None:
            return ASSUMED_READ_US
        fastest_us = min(1e6 * point.request_bytes / point.bytes_per_s for point in self.curve.points)
        return min(ASSUMED_READ_US, fastest_us)

    def read_delay_ms(self, *, together: bool) -> float:
        """Return the time that a worker waits for a read beyond the flash's own time; 0 if no kernel was measured.

        The loader must be scheduled, possibly on the core of a computing worker, and the waiting worker woken.

        together: the read is issued with other reads of its layer
        """
        measured_us = self._measured(lambda profile: profile.read_delay_us(self.workers, together=together))
        return (measured_us or (ASSUMED_READ_DELAY_US if self._no_run_measured else 0.0)) / 1e3

    @property
    def _no_run_measured(self) -> bool:
        """True if kernels were measured but no run, as at a start."""
        return self.profile is not None and bool(self.profile.decode) and not self.profile.steps

    # ---- speeds ----------------------------------------------------------------------------------------------
    def _in_order_ms(self, kind: DecodeKind, size_bytes: float, rows: dict[str, Any]) -> float | None:
        """Return the longer of the times of kernel and memory; None if neither was measured.

        A kernel's measurement may be too fast, if part of its data stayed in a large cache.
        """
        times_ms = self._kernel_ms(kind, size_bytes, 1.0, rows), self.sequential_read_ms(size_bytes)
        return max((time_ms for time_ms in times_ms if time_ms is not None), default=None)

    def _whole_rows_ms(self, size_bytes: float, shares: Iterable[tuple[Quantization, float]]) -> float | None:
        """Return the time of products with whole rows in order.

        shares: share of the bytes in each quantization
        """
        return summed(*(self._in_order_ms("matrix", size_bytes * part, self._rows(of)) for of, part in shares))

    def _kernel_ms(self, kind: DecodeKind, size_bytes: float, share: float, rows: dict[str, Any]) -> float | None:
        speed = self._measured(lambda profile: profile.decode_bytes_per_s(kind, self.workers, share, **rows))
        return None if speed is None else 1e3 * size_bytes / speed

    def _values_s_per_byte(self, share: float, *, predicted: bool) -> float | None:
        """Return the time for a byte of Up and Down rows of active neurons; None if not measured. The kernel of an Up
        row also prefetches the Down row, so that neither speed alone has a meaning."""
        kinds: tuple[DecodeKind, DecodeKind] = ("predicted_ups", "predicted_downs") if predicted else ("ups", "downs")

        def seconds(profile: DeviceProfile) -> float:
            return sum(
                part / profile.decode_bytes_per_s(kind, self.workers, share, **self._rows(quantization))
                for kind, (quantization, part) in zip(kinds, self._value_shares, strict=True)
            )

        return self._measured(seconds)

    def _measured(self, figure: Callable[[DeviceProfile], float]) -> float | None:
        """Return a figure of the profile; None without a profile, or if the figure raises KeyError."""
        try:
            return None if self.profile is None else figure(self.profile)
        except KeyError:
            return None

    # ---- quantizations ---------------------------------------------------------------------------------------
    @functools.cached_property
    def _value_shares(self) -> tuple[tuple[Quantization, float], tuple[Quantization, float]]:
        """Quantization and share of the bytes of Up and of Down. Down has all where Up decides which neurons fire; its
        rows then count half as either."""
        model, of_down = self.manifest.model, self.manifest.row_quantization("down")
        of_up = self.manifest.row_quantization("up") if model.gated else of_down
        up, down = (row_bytes(quantization, model.width) for quantization in (of_up, of_down))
        return (of_up, up / (up + down)), (of_down, down / (up + down))

    @functools.cached_property
    def _mixer_shares(self) -> dict[Quantization, float]:
        """Share of the weights of mixers in each quantization."""
        model, manifest = self.manifest.model, self.manifest
        qkv = model.attention_weights * model.qkv_rows / (model.qkv_rows + model.query_width)
        weights: dict[Quantization, float] = {}
        for name, count in (
            ("qkv", qkv),
            ("attention_output", model.attention_weights - qkv),
            ("recurrent_input", model.recurrent_weights),
        ):
            weights[manifest.quantization_of(name)] = weights.get(manifest.quantization_of(name), 0.0) + count
        return {quantization: count / sum(weights.values()) for quantization, count in weights.items() if count}

    @functools.cached_property
    def _fixed_shares(self) -> dict[Quantization, float]:
        """Share of the bytes of fixed matrices, which a step reads, in each quantization."""
        model, of_output = self.manifest.model, self.manifest.quantization_of("output")
        mixers = model.attention_weights + model.recurrent_weights
        sizes = {of: mixers * part * row_bytes(of, BLOCK_WEIGHTS) for of, part in self._mixer_shares.items()}
        output = model.vocabulary * model.width * row_bytes(of_output, BLOCK_WEIGHTS)
        sizes[of_output] = sizes.get(of_output, 0.0) + output
        return {quantization: size / sum(sizes.values()) for quantization, size in sizes.items()}

    def _rows(self, quantization: Quantization) -> dict[str, Any]:
        """Return arguments of profile queries for rows with a quantization.

        Unless they were measured, rows with minima take the time of q4k for each byte, and those of iq4 and mxfp4 the
        time of q4.
        """
        if quantization in MINIMUM_QUANTIZATIONS and not self._has_kernels(quantization):
            quantization = MINIMUM_QUANTIZATIONS[0]
        if quantization in CODEBOOK_QUANTIZATIONS and not self._has_kernels(quantization):
            quantization = "q4"
        return {"quantization": quantization, "row_weights": self.manifest.model.width}

    def _has_kernels(self, quantization: Quantization) -> bool:
        return self.profile is not None and any(point.quantization == quantization for point in self.profile.decode)

    @property
    def _gate_rows(self) -> dict[str, Any]:
        """Arguments of profile queries for rows of gates: those of other rows if the gates' kernels were not
        measured."""
        gates = self.manifest.trigger_quantization
        return self._rows(gates if self._has_kernels(gates) else self.manifest.quantization)

    def _pieces_ms(self, size_bytes: float, piece_bytes: int) -> float | None:
        if self.speed is None:
            return None
        return 1e3 * size_bytes / (self._share_of_speed(self.speed) * self.speed.piece_bytes_per_s(piece_bytes))

    def _share_of_speed(self, speed: MemorySpeed) -> float:
        """Return the share of the speed of `speed.threads` threads that the workers reach, if they are fewer."""
        if self.workers >= speed.threads:
            return 1.0
        return min(1.0, self.workers * speed.one_thread_bytes_per_s / speed.sequential_bytes_per_s)


def summed(*times_ms: float | None) -> float | None:
    """Return the sum; None if one of the times is None."""
    return None if any(time_ms is None for time_ms in times_ms) else sum(time_ms or 0.0 for time_ms in times_ms)
