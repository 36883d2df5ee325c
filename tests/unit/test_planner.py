"""The planner: what fits is used, what does not is refused with the figure that would fit, and plans are checked."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from neuronpipe.plans.cost.activation_rates import rates
from neuronpipe.plans.cost.read_sizes import read_units
from neuronpipe.plans.device.device import FlashCurve, FlashPoint, MemorySpeed, PiecePoint
from neuronpipe.plans.lab.shapes.models import model_named
from neuronpipe.plans.lab.shapes.pulled_manifest import manifest_of_pulled
from neuronpipe.plans.lab.shapes.shape_manifest import manifest_of_shape
from neuronpipe.plans.models.spec import LayerKind, ModelSpec
from neuronpipe.plans.package.byte_pair_tokens import tokenizer_bytes
from neuronpipe.plans.package.layout import PAGE_BYTES, compute_layout
from neuronpipe.plans.package.manifest import (
    Chat,
    FileEntry,
    Manifest,
    Predictor,
    PredictorQuality,
    Silent,
    SilentLayer,
    Source,
)
from neuronpipe.plans.plan.document import Mode, Plan, ProcessSpec, parse_plan, read_plan
from neuronpipe.plans.plan.memory_budget import MIB, Budgets, memory_budget, trusted_bytes
from neuronpipe.plans.plan.pinned_clusters import pins_within
from neuronpipe.plans.plan.report import difference, explain
from neuronpipe.plans.plan.segment_sizes import PARTIAL_TOKENS, RunShape, private_layouts, run_layouts
from neuronpipe.plans.planner.device_facts import DeviceFacts
from neuronpipe.plans.planner.plan_options import TECHNIQUES, MemoryLimit, PlanOptions
from neuronpipe.plans.planner.planned_range import expectation_of
from neuronpipe.plans.planner.planner import make_plan
from neuronpipe.plans.planner.slot_regions import NOTHING_PINNED, allocate_slots
from neuronpipe.plans.planner.validation import validate
from neuronpipe.plans.pull.catalog import catalog
from neuronpipe.protocol.errors import UserError

GIB = 1 << 30
# A virtual disk as one was measured: (KiB, reads at once, MB/s).
CURVE = FlashCurve(
    engine="io_uring",
    direct=True,
    points=tuple(
        FlashPoint(request_bytes=size << 10, depth=depth, bytes_per_s=speed * 1e6)
        for size, speeds in ((4, (70, 199, 266, 377)), (8, (121, 357, 479, 607)), (64, (580, 1071, 1204, 1241)))
        for depth, speed in zip((1, 8, 32, 128), speeds, strict=True)
    ),
)
SPEED = MemorySpeed(
    threads=2,
    one_thread_bytes_per_s=28e9,
    sequential_bytes_per_s=33e9,
    pieces=(PiecePoint(piece_bytes=2048, bytes_per_s=17e9), PiecePoint(piece_bytes=8192, bytes_per_s=21e9)),
)


def manifest(*, width: int = 320, neurons: int = 1024, layers: int = 8, order: str = "source") -> Manifest:
    model = ModelSpec(
        family="llama",
        width=width,
        neurons=neurons,
        layer_kinds=(LayerKind(layers),),
        query_heads=5,
        key_heads=1,
        head_width=64,
        vocabulary=4096,
        context_tokens=512,
        norm_epsilon=1e-5,
        activation="drelu",
        tied_embeddings=True,
    )
    return Manifest(
        name="m",
        source=Source("huggingface", "m", "LlamaForCausalLM"),
        model=model,
        quantization="q8",
        end_tokens=(0,),
        layout=compute_layout("q8", width, neurons, model.ffn_matrices, order),  # type: ignore[arg-type]
        files={"fixed.safetensors": FileEntry(3 * MIB, "0" * 64), "tokenizer.json": FileEntry(MIB // 4, "0" * 64)},
        quantization_error={},
        fired_by_layer=None,
    ).sealed()


def predicted(plain: Manifest) -> Manifest:
    """The same package with a predictor that names a sixth of the neurons, four of five of them rightly."""
    quality = PredictorQuality(recall=0.97, precision=0.8, predicted=0.16)
    return dataclasses.replace(
        plain,
        predictor=Predictor(
            rank=64,
            quantization="q8",
            reads="attention",
            sides=("gate", "up"),
            hidden="none",
            calibration_tokens=2000,
            by_layer=(quality,) * plain.model.layers,
        ),
        files={**plain.files, "predictor.safetensors": FileEntry(MIB, "0" * 64)},
    )


def with_template(plain: Manifest) -> Manifest:
    """The same package with a chat template."""
    return dataclasses.replace(plain, chat=Chat(begin="", end=""))


def device(workers: int = 2, memory_bytes: int = GIB) -> DeviceFacts:
    processes = [ProcessSpec(role=role, index=0, core=None) for role in ("coordinator", "loader", "cache", "prefill")]
    processes += [ProcessSpec(role="decode", index=n, core=n) for n in range(workers)]
    return DeviceFacts(
        is_described=True,
        id="d",
        memory_bytes=memory_bytes,
        flash_engine="threads",
        processes=tuple(processes),
        flash=CURVE,
        memory_speed=SPEED,
    )


def least_bytes(made_for: Manifest, facts: DeviceFacts) -> int:
    return make_plan(made_for, facts, PlanOptions()).memory.least_bytes


@pytest.mark.parametrize("experts", [1, 8])
def test_a_larger_block_window_takes_no_slots_from_what_stays(experts: int) -> None:
    """Where it opened, what stayed fell by up to a fifth, and a plan with more memory was slower."""
    plain = manifest(width=2048, neurons=8192, layers=8)
    routed = dataclasses.replace(plain.model, experts=experts, experts_per_token=min(2, experts))
    m = dataclasses.replace(plain, model=routed if experts > 1 else plain.model)
    both_bytes = m.trigger_slot_bytes + m.value_slot_bytes
    budgets = [int(m.clusters * both_bytes * n / 400) for n in range(2, 400)]
    filled = [
        allocate_slots(
            m,
            rates(m, "exact"),
            mode="exact",
            workers=2,
            max_batch=1,
            budget=budget,
            whole=True,
            cache=True,
            cache_tokens=0,
        )
        for budget in budgets
    ]
    made = [one for one in filled if one is not None]
    staying = [one.triggers - one.moving for one in made if one.window_blocks <= m.layout.blocks]
    assert staying == sorted(staying)
    windows = [one.window_blocks for one in made]
    assert windows == sorted(windows)
    assert len(set(windows)) > 2


def thresholded(plain: Manifest, share: float) -> Manifest:
    """The same package with SiLU, and with thresholds by which this share of the neurons is silent."""
    layers = tuple(SilentLayer(threshold=0.1, share=share) for _ in range(plain.model.layers))
    return dataclasses.replace(
        plain,
        model=dataclasses.replace(plain.model, activation="silu"),
        silent=Silent(share, layers, "text", 1000, 250, 10.0, 10.2),
    )


def seven_billion() -> Manifest:
    """The shape of a 7B in q4: the scales of Up and Down lie in the trigger part."""
    plain = manifest(width=4096, neurons=14336, layers=2, order="frequency")
    layout = compute_layout("q4", 4096, 14336, plain.model.ffn_matrices, "frequency")
    return dataclasses.replace(plain, quantization="q4", layout=layout).sealed()


def test_where_gates_stay_scales_move_to_the_parts_they_belong_to() -> None:
    m = seven_billion()
    made = make_plan(m, device(), PlanOptions(ffn_resident_share=0.5))
    assert (made.memory.moved_scales_from, made.memory.moved_scales_bytes) == (2304, 512)
    assert made.memory.trigger_slots == m.clusters
    assert made.memory.value_slots >= m.clusters * (0.5 * 6912 - 2304) / 4608 - 2  # 25 %, 15.6 % with scales at gates
    assert made.memory.slots_bytes <= 0.5 * made.memory.ffn_bytes + PAGE_BYTES  # of the segment's header
    assert run_layouts(m, made)["slots"].total_bytes == made.memory.slots_bytes
    bytes_per_read = made.expected.flash_bytes_per_token / made.expected.flash_reads_per_token
    assert bytes_per_read >= 8192
    assert "up/down slots with their scales" in explain(made)


@pytest.mark.parametrize("mode", ["exact", "predicted"])
def test_where_everything_stays_scales_move_in_exact_mode(mode: Mode) -> None:
    """There gates are read from end to end; predicted ones with their values."""
    made = make_plan(predicted(seven_billion()), device(), PlanOptions(mode=mode))
    assert made.memory.slots_bytes >= made.memory.ffn_bytes
    assert made.memory.are_scales_moved == (mode == "exact")


def test_scales_stay_where_both_parts_have_as_many_slots() -> None:
    made = make_plan(predicted(seven_billion()), device(), PlanOptions(ffn_resident_share=0.5, mode="predicted"))
    assert not made.memory.are_scales_moved


def test_scales_stay_where_flash_takes_longer_for_both_parts_than_it_saves() -> None:
    slow = tuple(
        FlashPoint(request_bytes=kib << 10, depth=depth, bytes_per_s=depth * speed)
        for kib, speed in ((4, 1e7), (8, 2e6), (64, 2e6))
        for depth in (1, 8, 32)
    )
    facts = dataclasses.replace(device(), flash=FlashCurve(engine="io_uring", direct=True, points=slow))
    assert not make_plan(
        seven_billion(), facts, PlanOptions(ffn_resident_share=0.5, bundle=False)
    ).memory.are_scales_moved


def test_of_neurons_that_are_not_silent_value_parts_are_read() -> None:
    m = thresholded(manifest(width=4096), 0.75)
    exact, made = (
        make_plan(m, device(), PlanOptions(mode=mode, ffn_resident_share=0.6)) for mode in ("exact", "thresholded")
    )
    assert m.layout.cluster_neurons == 1
    # Of each neuron that is missed the whole, against of a quarter of the neurons the value part.
    assert made.expected.flash_bytes_per_token < 0.3 * exact.expected.flash_bytes_per_token
    rows = [one.expected.dram_bytes_per_token - m.files["fixed.safetensors"].bytes for one in (exact, made)]
    assert rows[1] / rows[0] == pytest.approx((1 + 2 / 4) / 3, rel=0.05)
    assert made.memory.trigger_slots == m.clusters
    assert any("10.2 instead of 10 exact (+2.00%), on 250 held-out tokens of text" in line for line in made.reasons)
    assert exact == make_plan(dataclasses.replace(m, silent=None), device(), PlanOptions(ffn_resident_share=0.6))


def test_mode_thresholded_needs_thresholds_and_says_how_to_get_them() -> None:
    silu = dataclasses.replace(thresholded(manifest(), 0.5), silent=None)
    with pytest.raises(
        UserError, match=r"'m' has no thresholds; convert .* --by-neuron, .* `neuronpipe profile PACKAGE --silent 50%"
    ):
        make_plan(silu, device(), PlanOptions(mode="thresholded"))
    with pytest.raises(UserError, match=r"'m' computes drelu, and only silu has thresholds; take exact or"):
        make_plan(manifest(), device(), PlanOptions(mode="thresholded"))
    with pytest.raises(UserError, match="--baseline llm-in-a-flash: sets the mode"):
        make_plan(thresholded(manifest(), 0.5), device(), PlanOptions(mode="thresholded", baseline="llm-in-a-flash"))


def test_with_memory_to_spare_everything_is_resident_and_nothing_is_read() -> None:
    made = make_plan(manifest(), device(), PlanOptions())
    assert made.memory.trigger_slots == made.memory.value_slots == manifest().clusters
    assert made.memory.slots_bytes == made.memory.ffn_bytes
    assert made.expected.flash_bytes_per_token == 0


def test_gates_are_kept_before_up_and_down_because_every_token_reads_them() -> None:
    m = manifest(width=2048, layers=32)
    made = make_plan(m, device(), PlanOptions(ffn_resident_share=0.5))
    assert made.memory.trigger_slots == m.clusters
    assert made.memory.pins[0].triggers == str(m.layout.clusters)
    assert made.memory.value_slots < m.clusters


@pytest.mark.parametrize("share", [0.9, 0.5, 0.34, 0.2, 0.1])
def test_the_resident_share_that_was_asked_for_is_not_exceeded(share: float) -> None:
    memory = make_plan(manifest(), device(), PlanOptions(ffn_resident_share=share)).memory
    assert memory.slots_bytes <= share * memory.ffn_bytes + 2 * PAGE_BYTES  # its first page, and the last one whole


def test_a_limit_below_the_least_is_refused_and_the_figure_in_the_message_works() -> None:
    m, facts = manifest(), device()
    least = least_bytes(m, facts)
    with pytest.raises(UserError, match=f"--memory 1: the least for this package is {least} bytes: "):
        make_plan(m, facts, PlanOptions(memory_bytes=MemoryLimit(least - 1, "1", "bytes")))
    assert make_plan(m, facts, PlanOptions(memory_bytes=least)).memory.total_bytes() <= least
    with pytest.raises(UserError, match=r"--memory [0-9.]+MiB, a share of what is available now: the least"):
        make_plan(m, device(memory_bytes=least - 1), PlanOptions())


@given(tokenizer_bytes=st.integers(1, 10 * MIB))
def test_the_least_is_the_least_to_the_byte(tokenizer_bytes: int) -> None:
    m, facts = manifest(), device()
    m = dataclasses.replace(m, files={**m.files, "tokenizer.json": FileEntry(tokenizer_bytes, "0" * 64)})
    least = least_bytes(m, facts)
    assert make_plan(m, facts, PlanOptions(memory_bytes=least)).memory.least_bytes == least
    with pytest.raises(UserError, match="the least for this package"):
        make_plan(m, facts, PlanOptions(memory_bytes=least - 1))


@given(limit_bytes=st.integers(1, 3 * GIB), more_bytes=st.integers(0, 40))
def test_a_larger_limit_never_leaves_less_for_all_but_programs_of_strangers(limit_bytes: int, more_bytes: int) -> None:
    m = with_template(manifest())
    shape = dataclasses.replace(RunShape.of(make_plan(m, device(), PlanOptions()).compute), gateways=1)
    left = [trusted_bytes(m, shape, bytes_) for bytes_ in (limit_bytes, limit_bytes + more_bytes)]
    assert left == sorted(left)


@pytest.mark.parametrize("gateway", [False, True])
def test_what_is_reserved_for_grammars_and_templates_scales_with_the_limit(gateway: bool) -> None:
    """A constant 64 MiB for grammars nearly doubled the least limit of the demo."""
    m, facts = with_template(manifest()), device()
    if gateway:
        served = ProcessSpec(role="gateway", index=0, core=None)
        facts = dataclasses.replace(facts, processes=(*facts.processes, served))
    limits = least_bytes(m, facts), 510 * MIB, 16 * GIB
    made = [make_plan(m, facts, PlanOptions(memory_bytes=limit)).memory for limit in limits]
    grammars_mib = [memory.grammars_bytes / MIB for memory in made]
    assert grammars_mib == pytest.approx([max(8, limits[0] / 1.02 / 16 / MIB), 31.25, 64], abs=1e-3)
    templates_mib = [memory.templates_bytes / MIB for memory in made]
    assert templates_mib == pytest.approx([24, 31.25, 64] if gateway else [0, 0, 0], abs=1e-3)
    for memory in made:
        assert memory.total_bytes() - memory.slots_bytes > memory.grammars_bytes + memory.templates_bytes


@given(tokenizer_bytes=st.integers(1, 10 * MIB))
def test_the_least_that_an_error_names_in_mib_is_enough(tokenizer_bytes: int) -> None:
    m = manifest()
    m = dataclasses.replace(m, files={**m.files, "tokenizer.json": FileEntry(tokenizer_bytes, "0" * 64)})
    with pytest.raises(UserError) as caught:
        make_plan(m, device(), PlanOptions(memory_bytes=MIB))
    (shown_mib,) = re.findall(r"--memory 1MiB: the least for this package is (\d+)MiB: ", str(caught.value))
    make_plan(m, device(), PlanOptions(memory_bytes=int(shown_mib) * MIB))


def test_a_resident_share_too_small_for_one_block_per_worker_is_refused() -> None:
    with pytest.raises(UserError, match=r"--ffn-resident 1\.0%: the least"):
        make_plan(manifest(), device(), PlanOptions(ffn_resident_share=0.01))


@given(
    extra=st.one_of(st.integers(0, 12 * MIB), st.integers(0, 2 * GIB)),
    workers=st.integers(1, 5),
    neurons=st.integers(1, 3000),
    layers=st.integers(1, 13),
    width=st.sampled_from([32, 320, 1024, 4096]),
    order=st.sampled_from(["source", "frequency"]),
    mode=st.sampled_from(["exact", "predicted"]),
    without=st.frozensets(st.sampled_from(TECHNIQUES)),
    baseline=st.booleans(),
)
def test_every_accepted_limit_holds_and_leaves_room_for_what_is_moving(
    extra: int,
    workers: int,
    neurons: int,
    layers: int,
    width: int,
    order: str,
    mode: Any,
    without: frozenset[Any],
    baseline: bool,
) -> None:
    m, facts = predicted(manifest(width=width, neurons=neurons, layers=layers, order=order)), device(workers)
    wish = PlanOptions(baseline="llm-in-a-flash") if baseline else PlanOptions(mode=mode, without=without)
    least = make_plan(m, facts, dataclasses.replace(wish, memory_bytes=16 * GIB)).memory.least_bytes
    made = make_plan(m, facts, dataclasses.replace(wish, memory_bytes=least + extra))
    memory, layout = made.memory, m.layout
    assert memory.total_bytes() <= memory.limit_bytes
    flash = made.flash
    assert memory.staging_bytes == flash.depth * flash.most_read_bytes + flash.warm_up_reads * flash.warm_up_read_bytes
    assert flash.warm_up_read_bytes > flash.most_read_bytes or not flash.warm_up_reads
    if memory.trigger_slots == memory.value_slots == m.clusters:
        return
    window = made.compute.decode_window_blocks
    assert made.compute.prefill_window_blocks == window
    assert window == layout.blocks or made.compute.prefill_chunk_tokens <= PARTIAL_TOKENS
    open_clusters = layout.clusters if window == layout.blocks else workers * window * layout.block_clusters
    for slots, pins, reserved in (
        (memory.trigger_slots, memory.pins[0].counts(layers)[0], made.flash.reserved_triggers),
        (memory.value_slots, memory.pins[0].counts(layers)[1], made.flash.reserved_values),
    ):
        pinned = sum(pins_within(pins, slots, memory.moving_slots, m.clusters))  # while nothing is lent
        assert slots <= m.clusters
        assert slots == m.clusters or slots - pinned - reserved >= min(open_clusters, m.clusters), (
            "a window must fit beside the pinned and the free"
        )


def test_a_prompt_takes_many_tokens_at_once_though_few_slices_are_open() -> None:
    """The sums of a slice are added before the next one's. Chunks of 64 tokens would read all weights eight times."""
    sliced = manifest_of_shape(model_named("qwen3-8b"))
    options = PlanOptions(memory_bytes=2400 * 10**6, context_tokens=2048)
    plan = make_plan(sliced, device(memory_bytes=16 * GIB), options)
    assert plan.compute.prefill_window_blocks < sliced.layout.blocks
    assert plan.compute.prefill_chunk_tokens > PARTIAL_TOKENS
    validate(plan, sliced, "plan.json")


@pytest.mark.parametrize(("limit_gb", "reserved"), [(8, 16), (4, 16), (3, 11)])
def test_the_cache_frees_what_a_layer_may_miss_of_whole_experts(limit_gb: int, reserved: int) -> None:
    """Twice the eight of a token, but one in 64. With two free slots nearly each missed expert cost a message."""
    made_for = manifest_of_shape(model_named("qwen3-30b-a3b"))
    options = PlanOptions(memory_bytes=limit_gb * 10**9, context_tokens=2048)
    flash = make_plan(made_for, device(memory_bytes=16 * GIB), options).flash
    assert flash.reserved_triggers == flash.reserved_values == reserved


def test_predicted_mode_needs_a_predictor_and_names_the_command_that_makes_one() -> None:
    with pytest.raises(UserError, match="has no predictor; make one with `neuronpipe profile PACKAGE`"):
        make_plan(manifest(), device(), PlanOptions(mode="predicted"))
    with pytest.raises(UserError, match="has no predictor"):
        make_plan(manifest(), device(), PlanOptions(baseline="llm-in-a-flash"))
    assert make_plan(predicted(manifest()), device(), PlanOptions()).compute.mode == "exact"
    assert make_plan(predicted(manifest()), device(), PlanOptions(mode="predicted")).compute.mode == "predicted"


def test_the_predictor_is_counted_only_where_it_is_used() -> None:
    m = predicted(manifest())
    exact, guessed = (make_plan(m, device(), PlanOptions(mode=mode)).memory for mode in ("exact", "predicted"))
    assert guessed.fixed_bytes - exact.fixed_bytes == MIB


@settings(max_examples=40)
@given(
    width=st.sampled_from([256, 1024]),
    neurons=st.integers(1500, 5000),
    layers=st.integers(2, 8),
    workers=st.integers(1, 4),
    sequences=st.integers(1, 4),
    share=st.floats(0.5, 1),
    mode=st.sampled_from(["exact", "predicted"]),
)
def test_the_budget_has_a_field_for_every_layout_of_a_run_and_of_just_its_size(
    width: int, neurons: int, layers: int, workers: int, sequences: int, share: float, mode: Any
) -> None:
    m = predicted(manifest(width=width, neurons=neurons, layers=layers))
    wanted = PlanOptions(mode=mode, sequences=sequences, ffn_resident_share=share)
    made = make_plan(m, device(workers, memory_bytes=16 * GIB), wanted)
    laid_out = run_layouts(m, made) | private_layouts(m, made)
    budget = {name: getattr(made.memory, f"{name}_bytes", None) for name in laid_out}
    assert budget == {name: layout.total_bytes for name, layout in laid_out.items()}
    no_layout = ("interpreters", "vocabulary", "private", "bookkeeping", "staging", "grammars", "templates")
    rest = sum(getattr(made.memory, f"{name}_bytes") for name in no_layout)
    assert made.memory.total_bytes() == rest + sum(layout.total_bytes for layout in laid_out.values())


def test_predicted_neurons_are_kept_whole_so_both_parts_have_as_many_slots() -> None:
    m = predicted(manifest(order="frequency"))
    memory = make_plan(m, device(), PlanOptions(mode="predicted", ffn_resident_share=0.5)).memory
    assert memory.trigger_slots == memory.value_slots < m.clusters
    assert 0 < int(memory.pins[0].triggers) == int(memory.pins[0].values)


def test_bundles_are_read_whole_when_the_curve_says_that_one_read_costs_less_than_two() -> None:
    m = predicted(manifest())
    cheap_bytes = FlashCurve(
        engine="threads",
        direct=True,
        points=tuple(FlashPoint(request_bytes=s, depth=8, bytes_per_s=s * 1e5) for s in (4096, 8192, 65536)),
    )
    dear_bytes = FlashCurve(
        engine="threads",
        direct=True,
        points=tuple(FlashPoint(request_bytes=s, depth=8, bytes_per_s=1e8) for s in (4096, 8192, 65536)),
    )
    wish = PlanOptions(mode="predicted", ffn_resident_share=0.5)
    whole = make_plan(m, dataclasses.replace(device(), flash=cheap_bytes), wish).flash
    apart = make_plan(m, dataclasses.replace(device(), flash=dear_bytes), wish).flash
    assert whole.bundle
    assert not apart.bundle
    assert whole.merge_gap_bytes >= 0 == apart.merge_gap_bytes
    assert not make_plan(m, device(), dataclasses.replace(wish, without=frozenset({"bundle"}))).flash.bundle


def test_a_technique_that_is_left_out_is_off_in_the_plan_and_the_others_stay() -> None:
    m, wish = predicted(manifest(order="frequency")), PlanOptions(mode="predicted", ffn_resident_share=0.5)
    full = make_plan(m, device(), wish)

    def lacking(technique: Any) -> Plan:
        return make_plan(m, device(), dataclasses.replace(wish, without=frozenset({technique})))

    assert full.compute.pipeline
    assert full.compute.prefetch
    assert full.flash.prefetch_depth > 0
    assert not lacking("pipeline").compute.pipeline
    assert lacking("pipeline").compute.prefetch
    assert (lacking("prefetch").compute.prefetch, lacking("prefetch").flash.prefetch_depth) == (False, 0)
    assert lacking("predictor").compute.mode == "exact"
    small = lacking("cache").memory
    assert small.slots_bytes == Budgets(m).min_slots_bytes(2)
    assert small.pins == (NOTHING_PINNED,)


def test_the_windowed_baseline_has_no_pipeline_no_guesses_and_nothing_pinned() -> None:
    m = predicted(manifest(width=4096, neurons=4096, layers=32, order="frequency"))
    made = make_plan(m, device(memory_bytes=8 * GIB), PlanOptions(baseline="llm-in-a-flash"))
    assert made.compute.mode == "predicted"
    assert (made.compute.pipeline, made.compute.prefetch, made.flash.bundle) == (False, False, False)
    assert made.memory.pins == (NOTHING_PINNED,)
    assert made.memory.trigger_slots < 0.6 * m.clusters
    with pytest.raises(UserError, match="--baseline llm-in-a-flash: sets the mode"):
        make_plan(predicted(manifest()), device(), PlanOptions(baseline="llm-in-a-flash", mode="exact"))


def test_without_a_measurement_no_speed_is_expected() -> None:
    facts = dataclasses.replace(device(), flash=None, memory_speed=None)
    e = make_plan(manifest(), facts, PlanOptions(ffn_resident_share=0.5)).expected
    assert (e.tokens_per_s, e.flash_ms_per_token, e.sequential_ms_per_token) == (None, None, None)
    assert (e.first_token_ms, e.prefill_tokens_per_s) == (None, None)
    assert e.flash_bytes_per_token > 0


def test_the_expected_token_is_the_sum_of_its_terms() -> None:
    m = predicted(manifest(width=4096, neurons=14336, layers=8, order="frequency"))
    for wish in (PlanOptions(mode="predicted", ffn_resident_share=0.5, without=frozenset({"pipeline"})), PlanOptions()):
        e = make_plan(m, device(memory_bytes=8 * GIB), wish).expected
        assert e.dram_bytes_per_token == e.sequential_bytes_per_token + e.neuron_bytes_per_token
        assert e.sequential_ms_per_token == pytest.approx(e.sequential_bytes_per_token / 33e6, abs=1e-3)
        assert e.tokens_per_s is not None
        total_ms = (
            e.sequential_ms_per_token,
            e.neuron_ms_per_token,
            e.overhead_ms_per_token,
            e.exposed_flash_ms_per_token,
        )
        assert 1e3 / e.tokens_per_s == pytest.approx(sum(total_ms), rel=1e-2)  # type: ignore[arg-type]


def test_a_plan_counts_what_each_kind_of_tokenizer_takes() -> None:
    by_library, in_tables = (
        make_plan(
            dataclasses.replace(manifest(), compact_tokenizer=compact), device(memory_bytes=8 * GIB), PlanOptions()
        )
        for compact in (False, True)
    )
    file_bytes = manifest().files["tokenizer.json"].bytes
    saved_bytes = tokenizer_bytes(file_bytes, compact=False) - tokenizer_bytes(file_bytes, compact=True)
    assert by_library.memory.interpreters_bytes - in_tables.memory.interpreters_bytes == saved_bytes != 0


@pytest.mark.parametrize(
    ("name", "in_slices"), [("qwen3-1.7b", True), ("olmoe-7b", False), ("turbosparse-100m", False)]
)
def test_gates_of_slices_have_a_price_of_their_own(name: str, in_slices: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No gate is listed and no token chooses: with the price of sparse models, prompts seemed a quarter slower."""
    m = manifest_of_shape(model_named(name))
    before_ms = make_plan(m, device(memory_bytes=16 * GIB), PlanOptions()).expected.first_token_ms
    monkeypatch.setattr("neuronpipe.plans.cost.work_cost.SLICE_GATE_NS", 1e4)
    after_ms = make_plan(m, device(memory_bytes=16 * GIB), PlanOptions()).expected.first_token_ms
    assert before_ms is not None
    assert after_ms is not None
    assert (after_ms > 2 * before_ms) == in_slices


def test_a_prompt_is_expected_to_read_every_weight_once_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ASSUMED_TOKEN_WEIGHTS_PER_S", 1e15), ("ASSUMED_ATTENDED_PER_S", 1e15), ("GATE_NS", 0.0)):
        monkeypatch.setattr(f"neuronpipe.plans.cost.work_cost.{name}", value)  # so that memory is what counts
    monkeypatch.setattr("neuronpipe.plans.cost.prompt_time.SUM_PASSES", 0)
    m = manifest(width=1024, neurons=4096)
    made = make_plan(m, device(memory_bytes=8 * GIB), PlanOptions())
    e, chunk = made.expected, made.compute.prefill_chunk_tokens
    assert e.first_token_ms is not None
    neurons_bytes = m.clusters * (m.trigger_slot_bytes + m.value_slot_bytes)
    assert e.first_token_ms * 33e6 == pytest.approx(made.memory.fixed_bytes + neurons_bytes, rel=0.1)
    assert e.prefill_tokens_per_s == pytest.approx(chunk * 1e3 / e.first_token_ms, rel=1e-3)


@pytest.mark.parametrize("chunk", [16, 64, 512])
def test_the_speed_of_prompts_is_that_of_a_usual_one_with_any_chunk(chunk: int) -> None:
    """A first chunk attends to few tokens: with its speed, small chunks seemed faster than they are."""
    m = manifest(width=1024, neurons=1024)
    facts = device(memory_bytes=8 * GIB)
    made = make_plan(m, facts, PlanOptions(prefill_chunk_tokens=chunk))
    usual = expectation_of(made, m, None, prompt_tokens=512)(facts.measured)
    assert made.compute.prefill_chunk_tokens == chunk
    assert made.expected.prefill_tokens_per_s == pytest.approx(usual.prefill_tokens_per_s, rel=1e-3)


def test_a_prompt_takes_the_processor_longer_than_memory_where_nothing_was_measured() -> None:
    """Each weight is multiplied with every token of the chunk, two cores at 50 G a second; values that fire only."""
    m = manifest(width=1024, neurons=4096)
    made = make_plan(m, device(memory_bytes=8 * GIB), PlanOptions())
    e, tokens = made.expected, made.compute.prefill_chunk_tokens
    model = m.model
    matrices = model.layers * model.width * 2 * (model.query_width + model.key_width)
    gates = model.layers * model.neurons * model.width
    assert e.first_token_ms is not None
    assert matrices + gates < e.first_token_ms / 1e3 * 2 * 50e9 / tokens < matrices + 3 * gates


@pytest.mark.parametrize("mode", ["exact", "predicted"])
def test_a_share_of_one_is_everything(mode: str) -> None:
    m = predicted(manifest(width=1024, neurons=4096, order="frequency"))
    memory = make_plan(m, device(), PlanOptions(mode=mode, ffn_resident_share=1.0)).memory  # type: ignore[arg-type]
    assert memory.trigger_slots == memory.value_slots == m.clusters


def test_less_memory_is_never_expected_to_be_faster() -> None:
    m = predicted(manifest(width=1024, neurons=4096, order="frequency"))
    for mode in ("exact", "predicted"):
        speeds = [
            make_plan(m, device(), PlanOptions(mode=mode, ffn_resident_share=share)).expected.tokens_per_s  # type: ignore[arg-type]
            for share in (0.3, 0.5, 0.7, 0.9, 1.0)
        ]
        assert speeds == sorted(speeds)  # type: ignore[type-var]


def test_a_plan_survives_its_file_and_explains_itself(tmp_path: Path) -> None:
    made = make_plan(manifest(), device(), PlanOptions(ffn_resident_share=0.5))
    file = tmp_path / "plan.json"
    file.write_text(made.to_json())
    assert read_plan(file) == made
    assert made.id in explain(made)
    assert "decode.1" in explain(made)
    assert re.search(r"\n  grammars and templates +64\.0 MiB ", explain(made))


def test_a_difference_names_the_fields_that_differ_and_only_those() -> None:
    m = predicted(manifest())
    one, other = (
        make_plan(m, device(), PlanOptions()),
        make_plan(m, device(), PlanOptions(mode="predicted", sequences=2)),
    )
    said = difference(one, other)
    assert f"{one.id} -> {other.id}" in said
    assert re.search(r"compute\.mode +exact +predicted\n", said)
    assert re.search(r"compute\.sequences +1 +2 +\+100\.0 %", said)
    assert "context_tokens" not in said
    assert difference(one, one) == f"the plans are the same: {one.id}\n"


def test_a_difference_shows_the_beginning_of_a_packages_id() -> None:
    """With both in full the table was 150 characters wide."""
    one = make_plan(manifest(), device(), PlanOptions())
    said = difference(one, dataclasses.replace(one, package_id="f" * 64))
    assert f"{one.package_id[:12]}...  {'f' * 12}...\n" in said
    assert one.package_id not in said


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"version": 1}, "'version'"),
        ({"compute": 3}, "field 'compute': expected an object, found 3"),
        ({"surprise": 1}, "field 'surprise': unknown field"),
        ({"device_id": "other"}, "'id' does not match"),
    ],
)
def test_a_damaged_plan_is_refused_naming_the_field(change: dict[str, object], complaint: str) -> None:
    data = json.loads(make_plan(manifest(), device(), PlanOptions()).to_json()) | change
    with pytest.raises(UserError, match=complaint):
        parse_plan(json.dumps(data).encode(), "plan.json")


def test_a_plan_for_another_package_is_refused_with_the_command_that_makes_the_right_one() -> None:
    made: Plan = make_plan(manifest(), device(), PlanOptions())
    made.check(package_id=made.package_id, device_id="d", where="plan.json")
    with pytest.raises(UserError, match=r"neuronpipe plan PACKAGE -o plan\.json"):
        made.check(package_id="another", device_id="d", where="plan.json")


def test_the_same_wishes_give_the_same_plan_and_other_wishes_another_id() -> None:
    one, two = (make_plan(manifest(), device(), PlanOptions()) for _ in range(2))
    assert one.id == two.id
    assert dataclasses.replace(one, device_id="e").id != one.id


def test_the_account_grows_with_scores_sampling_and_the_logits_prefill_is_asked_for() -> None:
    m = manifest()
    shape = RunShape(
        mode="exact", processes=6, workers=2, prefill_threads=2, sequences=1, context_tokens=64, logit_rows=8
    )

    def private_bytes(made_for: Manifest, processes: RunShape, chunk: int = 1) -> int:
        return memory_budget(made_for, processes, prefill_chunk_tokens=chunk, staging_bytes=0).private_bytes

    small = private_bytes(m, shape)
    assert small == private_bytes(m, shape, chunk=8) < private_bytes(m, shape, chunk=9)
    assert private_bytes(m, dataclasses.replace(shape, context_tokens=512)) - small == 32 * (512 - 64) * 4
    words = dataclasses.replace(m, model=dataclasses.replace(m.model, vocabulary=m.model.vocabulary + 1000))
    assert private_bytes(words, shape) - small == 8 * 1000


def test_a_cluster_of_a_large_model_takes_at_most_32_bytes_of_bookkeeping() -> None:
    m = manifest(width=1024, neurons=14336, layers=512)  # as many clusters as a 47B model has
    assert 3_600_000 <= m.clusters <= 3_700_000
    shape = RunShape(
        mode="exact", processes=6, workers=2, prefill_threads=2, sequences=1, context_tokens=64, logit_rows=8
    )
    entries_bytes = 2 * 4 * m.clusters
    taken = memory_budget(m, shape, prefill_chunk_tokens=64, staging_bytes=0)
    assert taken.residency_bytes - entries_bytes < MIB  # rings and single words
    assert taken.bookkeeping_bytes + entries_bytes <= 32 * m.clusters


def mixture(activation: str, fired: float) -> Manifest:
    """Thirty-two experts of 768 neurons, four a token; that share of a chosen expert's neurons fires."""
    plain = manifest(width=1536, neurons=768)
    model = dataclasses.replace(
        plain.model, activation=activation, experts=32, experts_per_token=4, router="softmax", router_reads="layer"
    )
    layout = compute_layout("q4", 1536, 768, model.ffn_matrices, "source")
    measured = (fired,) * model.layers
    return dataclasses.replace(
        plain, model=model, quantization="q4", layout=layout, fired_by_layer=measured, trigger_fired_by_layer=measured
    ).sealed()


@pytest.mark.parametrize(
    ("activation", "fired", "whole"), [("silu", 1.0, True), ("relu", 0.4, True), ("relu", 0.02, False)]
)
def test_experts_are_read_whole_where_gates_alone_would_save_less_than_small_reads_cost(
    activation: str, fired: float, whole: bool
) -> None:
    made = make_plan(mixture(activation, fired), device(), PlanOptions(ffn_resident_share=0.3))
    assert made.flash.bundle is whole
    assert (made.memory.trigger_slots == made.memory.value_slots) is whole
    assert any("feed-forwards are read whole" in reason for reason in made.reasons) is whole


def test_experts_that_are_read_in_pieces_need_few_staging_buffers() -> None:
    """The pieces of eight such reads keep flash as busy as 32 short ones, which would take 420 MiB of staging."""
    flash = make_plan(
        manifest_of_pulled(catalog()["gpt-oss-120b"]), device(memory_bytes=16 * GIB), PlanOptions(context_tokens=2048)
    ).flash
    assert (flash.depth, flash.bundle) == (8, True)


def test_of_a_dense_model_that_is_read_whole_both_parts_stay_pinned() -> None:
    plain = manifest()
    silu = dataclasses.replace(plain, model=dataclasses.replace(plain.model, activation="silu")).sealed()
    memory = make_plan(silu, device(), PlanOptions(ffn_resident_share=0.6)).memory
    assert int(memory.pins[0].triggers) == int(memory.pins[0].values) > 0


def test_gates_that_all_stay_leave_values_to_be_read_one_by_one() -> None:
    made = make_plan(manifest(order="frequency"), device(), PlanOptions(ffn_resident_share=0.7))
    assert not made.flash.bundle
    assert made.memory.trigger_slots > made.memory.value_slots


def test_units_of_reading_are_told_for_each_mode_and_residency() -> None:
    rows = read_units(predicted(mixture("drelu", 0.1)), CURVE)
    exact, guessed = [[row for row in rows if row["mode"] == mode] for mode in ("exact", "predicted")]
    assert [row["resident_share"] for row in exact] == [0.1, 0.3, 0.5, 0.75]
    assert [row["unit"] for row in guessed] == ["cluster"]
    assert guessed[0]["planes_us"] > guessed[0]["interleaved_us"]  # two reads for one
    assert exact[0]["planes_us"] < exact[0]["interleaved_us"]  # gates that do not fit, with nothing between them
    assert exact[-1]["unit"] == "part"
    assert exact[-1]["planes_us"] == exact[-1]["interleaved_us"]


def untied(*, tied: bool = False) -> Manifest:
    """A mixture's size of an embedding: 64 MiB in q8, of 112 MiB of neurons."""
    plain = manifest(width=1024, neurons=4096, layers=9)
    model = dataclasses.replace(plain.model, vocabulary=65536, tied_embeddings=tied)
    fixed = FileEntry(200 * MIB, "0" * 64)
    return dataclasses.replace(plain, model=model, files=plain.files | {"fixed.safetensors": fixed}).sealed()


def test_the_embedding_stays_on_flash_where_slots_lack_its_memory() -> None:
    m, facts = untied(), device()
    least = least_bytes(m, facts)
    short, ample = (make_plan(m, facts, PlanOptions(memory_bytes=limit)) for limit in (least + 40 * MIB, 4 * GIB))
    assert short.compute.embedding_on_flash
    assert not ample.compute.embedding_on_flash
    assert 63 * MIB <= ample.memory.fixed_bytes - short.memory.fixed_bytes <= 64 * MIB
    assert any("the embedding stays on flash: 64 MiB more for neurons" in reason for reason in short.reasons)
    layouts = [run_layouts(m, plan)["fixed"] for plan in (short, ample)]
    assert [layout["embedding_checksums"].shape for layout in layouts] == [(65536,), (0,)]
    tied = make_plan(untied(tied=True), facts, PlanOptions(memory_bytes=least_bytes(untied(tied=True), facts)))
    assert not tied.compute.embedding_on_flash


def test_an_embedding_returns_to_memory_where_all_slots_fit_as_well() -> None:
    m, facts = untied(), device()
    most = make_plan(m, facts, PlanOptions(memory_bytes=4 * GIB)).memory.total_bytes()
    limits = range(least_bytes(m, facts), most + 80 * MIB, 8 * MIB)
    plans = [make_plan(m, facts, PlanOptions(memory_bytes=limit)) for limit in limits]
    on_flash = [plan.compute.embedding_on_flash for plan in plans]
    assert on_flash == sorted(on_flash, reverse=True)
    last, first = plans[on_flash.index(False) - 1], plans[on_flash.index(False)]
    assert (last.memory.value_slots, first.memory.value_slots) == (m.clusters, m.clusters)
    assert first.expected.tokens_per_s >= last.expected.tokens_per_s


def test_a_residency_that_memory_allows_leaves_the_embedding_in_memory() -> None:
    m, facts = untied(), device()
    assert not make_plan(m, facts, PlanOptions(ffn_resident_share=0.5, memory_bytes=4 * GIB)).compute.embedding_on_flash
    tight = PlanOptions(ffn_resident_share=0.5, memory_bytes=least_bytes(m, facts) + 30 * MIB)
    assert make_plan(m, facts, tight).compute.embedding_on_flash
