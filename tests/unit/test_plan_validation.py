"""A plan from a file is obeyed only when its package could be run by it; what is wrong is named by its field."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from neuronpipe.native import ffi, lib
from neuronpipe.plans.models.spec import RANGES
from neuronpipe.plans.package.native_fields import native_fields
from neuronpipe.plans.package.parsing.parse import MAX_CLUSTERS
from neuronpipe.plans.plan.document import Plan, parse_plan
from neuronpipe.plans.plan.memory_budget import MIB
from neuronpipe.plans.plan.segment_sizes import PARTIAL_TOKENS
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.planner import make_plan
from neuronpipe.plans.planner.validation import validate
from neuronpipe.protocol.errors import UserError
from neuronpipe.services.worker.native_model import layer_facts, native_shape
from neuronpipe.services.worker.participant import create_engine

from tests.unit.test_planner import device, least_bytes, manifest, seven_billion


def made(workers: int = 2, **wanted: Any) -> Plan:
    facts = device(workers)
    anywhere = tuple(dataclasses.replace(process, core=None) for process in facts.processes)
    return make_plan(manifest(), dataclasses.replace(facts, processes=anywhere), PlanOptions(**wanted))


def resealed(good: Plan, path: str, value: Any) -> str:
    """The plan's file with one field changed and the id that belongs to it: only the field itself can be wrong."""
    whole = dataclasses.asdict(good)
    *folders, name = path.split(".")
    data: Any = whole
    for folder in folders:
        data = data[int(folder)] if folder.isdigit() else data[folder]
    data[name] = value
    fields = {key: json.loads(json.dumps(part)) for key, part in whole.items()}
    processes = [dict(process) for process in fields["compute"]["processes"]]
    rebuilt = dataclasses.replace(
        good,
        compute=dataclasses.replace(
            good.compute,
            **(
                fields["compute"]
                | {"processes": tuple(type(good.compute.processes[0])(**process) for process in processes)}
            ),
        ),
        memory=dataclasses.replace(good.memory, **fields["memory"]),
        flash=dataclasses.replace(good.flash, **fields["flash"]),
    )
    return rebuilt.to_json()


WRONG: list[tuple[str, Any, str]] = [
    ("compute.processes.0.role", "gateway", "compute.processes"),
    ("compute.processes.0.role", "loader", "compute.processes"),
    ("compute.processes.4.index", 1, "compute.processes"),
    ("compute.processes.4.index", 7, "compute.processes"),
    ("compute.processes.4.core", 100_000, "compute.processes.4.core"),
    ("compute.processes.4.core", -1, "compute.processes.4.core"),
    ("compute.context_tokens", -1, "compute.context_tokens"),
    ("compute.context_tokens", 1 << 40, "compute.context_tokens"),
    ("compute.context_tokens", 256, "compute.prefill_chunk_tokens"),
    ("compute.sequences", 2, "memory.kv_bytes"),
    ("compute.sequences", 0, "compute.sequences"),
    ("compute.sequences", 1 << 33, "compute.sequences"),
    ("compute.prefill_chunk_tokens", 0, "compute.prefill_chunk_tokens"),
    ("compute.prefill_threads", 0, "compute.prefill_threads"),
    ("compute.prefill_threads", 3, "memory.residency_bytes"),
    ("compute.mode", "predicted", "compute.mode"),
    ("flash.prefetch_depth", -1, "flash.prefetch_depth"),
    ("flash.prefetch_depth", 4096, "flash.prefetch_depth"),
    ("flash.most_read_bytes", 0, "flash.most_read_bytes"),
    ("flash.most_read_bytes", 1 << 40, "flash.most_read_bytes"),
    ("flash.most_read_bytes", 12289, "flash.most_read_bytes"),
    ("flash.most_read_bytes", 1 << 25, "flash.warm_up_read_bytes"),
    ("flash.depth", 100, "memory.staging_bytes"),
    ("flash.warm_up_reads", -1, "flash.warm_up_reads"),
    ("flash.warm_up_reads", 4096, "flash.warm_up_reads"),
    ("flash.warm_up_read_bytes", 4096, "flash.warm_up_read_bytes"),
    ("flash.warm_up_read_bytes", 1 << 30, "flash.warm_up_read_bytes"),
    ("flash.warm_up_read_bytes", (1 << 20) + 1, "flash.warm_up_read_bytes"),
    ("flash.merge_gap_bytes", -1, "flash.merge_gap_bytes"),
    ("flash.merge_gap_bytes", 1 << 30, "flash.merge_gap_bytes"),
    ("memory.fixed_bytes", 1, "memory.fixed_bytes"),
    ("memory.trace_bytes", 0, "memory.trace_bytes"),
    ("memory.bookkeeping_bytes", 0, "memory.bookkeeping_bytes"),
    ("memory.prefill_stage_bytes", 0, "memory.prefill_stage_bytes"),
    ("memory.staging_bytes", 0, "memory.staging_bytes"),
    ("compute.logit_rows", 0, "compute.logit_rows"),
    ("compute.draft_tokens", -1, "compute.draft_tokens"),
    ("compute.draft_tokens", 4, "compute.draft_tokens"),
    ("compute.decode_window_blocks", 0, "compute.decode_window_blocks"),
    ("compute.prefill_window_blocks", 1 << 20, "compute.prefill_window_blocks"),
    ("compute.spin_us", -1, "compute.spin_us"),
    ("flash.engine", "mmap", "flash.engine"),
    ("flash.depth", 0, "flash.depth"),
    ("flash.depth", 4097, "flash.depth"),
    ("flash.reserved_values", -1, "flash.reserved_values"),
    ("flash.reserved_values", 1 << 20, "flash.reserved_values"),
    ("memory.trigger_slots", 1 << 30, "memory.trigger_slots"),
    ("memory.value_slots", 1, "reserved_values"),
    ("memory.pins", [], "memory.pins"),
    ("memory.pins.0.texts", 2, "memory.pins"),
    ("memory.pins.0.triggers", "1048576", "memory.pins.0.triggers"),
    ("memory.pins.0.triggers", "1x3", "memory.pins.0.triggers"),
    ("memory.pins.0.triggers", "12y2", "memory.pins.0.triggers"),
    ("memory.pins.0.values", "60", "memory.value_slots"),
    ("memory.private_bytes", 0, "memory.private_bytes"),
    ("memory.slots_bytes", -1, "memory.slots_bytes"),
    ("memory.moved_scales_bytes", 64, "memory.moved_scales_bytes"),
    ("memory.moved_scales_from", 64, "memory.moved_scales_from"),
    ("memory.least_bytes", 1, "memory.least_bytes"),
    ("memory.grammars_bytes", 0, "memory.grammars_bytes"),
    ("memory.grammars_bytes", 1 << 40, "memory.grammars_bytes"),
    ("memory.templates_bytes", 1, "memory.templates_bytes"),
    ("memory.limit_bytes", 1, "memory.limit_bytes"),
]


@pytest.mark.parametrize(("path", "value", "named"), WRONG)
def test_a_plan_that_no_planner_makes_is_refused_by_its_field(path: str, value: Any, named: str) -> None:
    good = made(ffn_resident_share=0.65)
    with pytest.raises(UserError, match=rf"^plan\.json: field '[a-z_.0-9]*{named}': .*neuronpipe plan"):
        validate(parse_plan(resealed(good, path, value).encode(), "plan.json"), manifest(), "plan.json")


@settings(max_examples=100)
@given(
    extra=st.integers(0, 12 * MIB), workers=st.integers(1, 5), neurons=st.integers(1, 3000), layers=st.integers(1, 9)
)
def test_every_plan_of_the_planner_is_accepted(extra: int, workers: int, neurons: int, layers: int) -> None:
    package, facts = manifest(neurons=neurons, layers=layers, order="frequency"), device(workers)
    facts = dataclasses.replace(
        facts, processes=tuple(dataclasses.replace(process, core=None) for process in facts.processes)
    )
    limit = least_bytes(package, facts) + extra
    validate(make_plan(package, facts, PlanOptions(memory_bytes=limit)), package, "plan.json")


@settings(max_examples=50)
@given(extra=st.integers(0, 200 * MIB), workers=st.integers(1, 3))
def test_every_plan_of_slots_with_moved_scales_is_accepted(extra: int, workers: int) -> None:
    package, facts = seven_billion(), device(workers)
    facts = dataclasses.replace(
        facts, processes=tuple(dataclasses.replace(process, core=None) for process in facts.processes)
    )
    validate(
        make_plan(package, facts, PlanOptions(memory_bytes=least_bytes(package, facts) + extra)), package, "plan.json"
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device_id", "x\x1b[2J\ud800"),
        ("reasons", ["a\nb"]),
        ("reasons", "x" * 100_000),
        ("version", 10**4000),
        ("x" * 100_000, 1),
        ("flash", {"depth": 10**4000}),
        ("package_id", [[["x" * 1000] * 100] * 100]),
    ],
)
def test_what_a_plan_says_is_quoted_in_part_and_printable(field: str, value: Any) -> None:
    data = json.loads(made().to_json())
    data[field] = {**data[field], **value} if isinstance(value, dict) else value
    with pytest.raises(UserError, match=r"plan\.json: field '") as caught:
        parse_plan(json.dumps(data).encode(), "plan.json")
    assert len(str(caught.value)) < 300
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400])
def test_numbers_that_are_none_are_refused(number: str) -> None:
    text = made().to_json()
    expected = json.loads(text)["expected"]["miss_rate"]
    with pytest.raises(UserError, match=r"plan\.json: "):
        parse_plan(text.replace(f'"miss_rate": {expected}', f'"miss_rate": {number}').encode(), "plan.json")


@pytest.mark.parametrize(
    "wrong",
    [
        {"window_blocks": 0},
        {"partial_tokens": 0},
        {"partial_tokens": 1, "window_blocks": 1},
        {"logit_rows": 0},
    ],
)
def test_the_engine_refuses_a_place_that_contradicts_itself(wrong: dict[str, int]) -> None:
    m = manifest()
    right = {
        "sequences": 1,
        "max_tokens": 2,
        "logit_rows": 1,
        "window_blocks": m.layout.blocks,
        "partial_tokens": 2,
    }
    shape, shared = native_shape(m, 8, predicts=False), ffi.new("np_shared *")
    layers = bare_layers(m)
    fixed = ffi.new("np_fixed *", {"layers": layers})

    def create(config: dict[str, int]) -> Any:
        return create_engine(shape, fixed, shared, ffi.new("np_engine_config *", config))

    lib.np_engine_destroy(create(right))
    with pytest.raises(ValueError, match=f"refuses `{next(iter(wrong))}`"):
        create(right | wrong)


def test_packages_requests_and_the_engine_agree_on_how_many_clusters_there_may_be() -> None:
    assert MAX_CLUSTERS == lib.NP_REQUEST_CLUSTER_MASK + 1
    shape = native_shape(manifest(), 8, predicts=False)
    shape.layers = MAX_CLUSTERS // shape.clusters + 1
    of_each = {"experts": 1, "key_heads": shape.key_heads, "head_width": shape.head_width}
    layers = ffi.new("np_layer[]", [{"first_ffn": n, **of_each} for n in range(shape.layers)])
    fixed = ffi.new("np_fixed *", {"layers": layers})
    config = {"sequences": 1, "max_tokens": 1, "logit_rows": 1, "window_blocks": 1}
    native = ffi.new("np_engine_config *", config | {"partial_tokens": 1})
    with pytest.raises(ValueError, match="refuses `first_ffn`"):
        create_engine(shape, fixed, ffi.new("np_shared *"), native)
    shape.layers -= 1
    lib.np_engine_destroy(create_engine(shape, fixed, ffi.new("np_shared *"), native))


def bare_layers(of: Any) -> Any:
    """The layers of a model without their tensors."""
    return ffi.new("np_layer[]", [layer_facts(of, n) for n in range(of.model.layers)])


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"first_ffn": 0}, "first_ffn"),
        ({"experts": 0}, "first_ffn"),
        ({"experts": 0, "mixer": lib.NP_MIXER_NONE}, "experts"),
        ({"mixer": 9}, "mixer"),
        ({"mixer": lib.NP_MIXER_DELTANET}, "recurrent_input"),
        ({"mixer": lib.NP_MIXER_KDA}, "recurrent_input"),
        ({"state_before": 1}, "state_before"),
        ({"experts": 2}, "experts"),
        ({"routed_experts": 1}, "experts"),
    ],
)
def test_the_engine_says_which_field_of_a_layer_is_wrong(wrong: dict[str, int], field: str) -> None:
    m = manifest()
    layers, config = bare_layers(m), {"sequences": 1, "max_tokens": 1, "logit_rows": 1, "window_blocks": 1}
    for name, value in wrong.items():
        setattr(layers[1], name, value)
    fixed, native = ffi.new("np_fixed *", {"layers": layers}), ffi.new("np_engine_config *", config)
    native.partial_tokens = 1
    with pytest.raises(ValueError, match=f"refuses `{field}`"):
        create_engine(native_shape(m, 8, predicts=False), fixed, ffi.new("np_shared *"), native)


def of_gate(**fields: int) -> dict[str, dict[str, int]]:
    """The trigger's place with some of it changed."""
    place = native_shape(manifest(), 8, predicts=False).gate
    return {
        "gate": {name: getattr(place, name) for name in ("part", "quants", "scales_part", "scales", "type")} | fields
    }


@pytest.mark.parametrize(
    ("wrong", "field"),
    [
        ({"width": 0}, "width"),
        ({"width": 33}, "width"),
        ({"key_heads": 0}, "key_heads"),
        ({"latent_width": 64, "rotary_width": 8, "value_width": 32, "key_heads": 2}, "latent_width"),
        ({"latent_width": 33, "rotary_width": 8, "value_width": 32, "key_heads": 1}, "latent_width"),
        ({"latent_width": 64, "rotary_width": 7, "value_width": 32, "key_heads": 1}, "rotary_width"),
        ({"latent_width": 64, "rotary_width": 8, "value_width": 0, "key_heads": 1}, "value_width"),
        ({"latent_width": 64, "rotary_width": 8, "value_width": 32, "key_heads": 1, "query_rank": 5}, "query_rank"),
        (
            {"latent_width": 64, "rotary_width": 8, "value_width": 32, "key_heads": 1, "heads_width": 9999},
            "latent_down",
        ),
        ({"rotary_width": 8}, "rotary_width"),
        ({"query_rank": 32}, "query_rank"),
        ({"head_width": 7}, "head_width"),
        ({"experts": 0}, "experts"),
        ({"experts": 1 << 20}, "experts"),
        ({"experts_per_token": 2}, "experts_per_token"),
        ({"router": 7}, "router"),
        ({"chosen_per_token": 1}, "chosen_per_token"),
        ({"router_groups": 0}, "router_groups"),
        ({"groups_per_token": 2}, "groups_per_token"),
        ({"routed_scale": 0.0}, "routed_scale"),
        ({"head_norm": 1, "joint_norm": 1}, "joint_norm"),
        ({"heads_width": 1}, "heads_width"),
        ({"state_heads": 4}, "state_heads"),
        ({"convolution_tokens": 9}, "convolution_tokens"),
        ({"state_elements": 8}, "state_slots"),
        ({"min_time_step": -1.0}, "min_time_step"),
        ({"router_reads": 1}, "router_reads"),
        ({"norm": 2}, "norm"),
        ({"norms": 3}, "norms"),
        ({"norms": -1}, "norms"),
        ({"norms": lib.NP_NORMS_BOTH, "parallel": 1}, "norms"),
        ({"norms": lib.NP_NORMS_AFTER}, "attention_output_norm"),
        ({"score_cap": -1.0}, "score_cap"),
        ({"score_cap": float("nan")}, "score_cap"),
        ({"logit_cap": float("inf")}, "logit_cap"),
        ({"activation": lib.NP_CLAMPED_SWIGLU, "gated": 0}, "activation"),
        ({"query_heads": 3, "key_heads": 2}, "query_heads"),
        ({"activation": 9}, "activation"),
        ({"activation": lib.NP_SILU, "gated": 0}, "activation"),
        ({"activation": lib.NP_RELU, "activation_threshold": -0.1}, "activation_threshold"),
        ({"activation": lib.NP_RELU, "activation_threshold": float("nan")}, "activation_threshold"),
        ({"activation": lib.NP_RELU2, "activation_threshold": 0.1}, "activation_threshold"),
        ({"embedding_scale": 0.0}, "embedding_scale"),
        ({"residual_scale": -1.0}, "residual_scale"),
        ({"attention_scale": 0.0}, "attention_scale"),
        ({"logit_scale": float("inf")}, "logit_scale"),
        ({"activation": lib.NP_RELU, "gated": 0}, "up"),
        ({"cluster_neurons": 0}, "cluster_neurons"),
        ({"clusters": 1}, "clusters"),
        ({"blocks": 0}, "blocks"),
        ({"slot_bytes": [64, 1 << 20]}, "gate"),
        ({"slot_bytes": [1 << 20, 64]}, "up"),
        (of_gate(part=1), "gate"),
        (of_gate(scales_part=2), "gate"),
        (of_gate(quants=0xFFFFFFFF), "gate"),
        ({"predictor_rank": 33, "predictor_type": lib.NP_Q4}, "predictor_rank"),
        ({"predictor_rank": 32, "predictor_type": lib.NP_Q4}, "ranks"),
    ],
)
def test_the_engine_says_which_field_of_a_shape_is_wrong(wrong: dict[str, Any], field: str) -> None:
    m = manifest()
    shape = native_shape(m, 8, predicts=False)
    for name, value in wrong.items():
        setattr(shape, name, value)
    refuse(shape, field)


def refuse(shape: Any, field: str) -> None:
    """The engine takes no such shape of `manifest`, because of the field."""
    config = {"sequences": 1, "max_tokens": 1, "logit_rows": 1, "window_blocks": 1, "partial_tokens": 1}
    native, layers = ffi.new("np_engine_config *", config), bare_layers(manifest())
    with pytest.raises(ValueError, match=f"refuses `{field}`"):
        create_engine(shape, ffi.new("np_fixed *", {"layers": layers}), ffi.new("np_shared *"), native)


@pytest.mark.parametrize("field", sorted(RANGES.keys() & {field.name for field in native_fields("np_shape")}))
def test_the_engine_refuses_the_numbers_that_a_model_may_not_have(field: str) -> None:
    maximum = RANGES[field].maximum
    for number in (maximum * 1.001, math.nan) if isinstance(maximum, float) else (maximum + 1,):
        shape = native_shape(manifest(), 8, predicts=False)
        setattr(shape, field, number)
        refuse(shape, field)


def test_the_engine_refuses_local_positions_without_their_table_or_scale() -> None:
    m = manifest()
    shape, layers, table = native_shape(m, 8, predicts=False), bare_layers(m), ffi.new("float[]", m.model.head_width)
    config = {"sequences": 1, "max_tokens": 2, "logit_rows": 1, "window_blocks": m.layout.blocks, "partial_tokens": 2}
    fixed, native = ffi.new("np_fixed *", {"layers": layers}), ffi.new("np_engine_config *", config)
    layers[1].local_positions = 1
    with pytest.raises(ValueError, match="refuses `local_positions`"):
        create_engine(shape, fixed, ffi.new("np_shared *"), native)
    fixed.local_inverse_frequency = table
    lib.np_engine_destroy(create_engine(shape, fixed, ffi.new("np_shared *"), native))
    shape.local_attention_scale = 0
    with pytest.raises(ValueError, match="refuses `local_attention_scale`"):
        create_engine(shape, fixed, ffi.new("np_shared *"), native)


@pytest.mark.parametrize("wrong", [{"norms": lib.NP_NORMS_AFTER}, {"score_cap": 1.0}, {"logit_cap": 1.0}])
@pytest.mark.parametrize("place", ["external_products", "offload_blocks"])
def test_only_our_own_stages_compute_caps_and_norms_of_outputs(wrong: dict[str, Any], place: str) -> None:
    m = manifest()
    shape, layers = native_shape(m, 8, predicts=False), bare_layers(m)
    config = {"sequences": 1, "max_tokens": 2, "logit_rows": 1, "window_blocks": m.layout.blocks, "partial_tokens": 2}
    native = ffi.new("np_engine_config *", config | {place: 1, "product_blocks": 1})
    shared = ffi.new("np_shared *", {"inputs": ffi.new("float[]", 1), "outputs": ffi.new("float[]", 1)})
    fixed = ffi.new("np_fixed *", {"layers": layers})
    lib.np_engine_destroy(create_engine(shape, fixed, shared, native))
    for name, value in wrong.items():
        setattr(shape, name, value)
    with pytest.raises(ValueError, match=f"refuses `{place}`"):
        create_engine(shape, fixed, shared, native)


@pytest.mark.parametrize("below", [-0.1, float("nan"), float("inf")])
def test_the_engine_refuses_a_threshold_that_is_none(below: float) -> None:
    shape = native_shape(manifest(), 8, predicts=False)
    shape.activation = lib.NP_SILU
    config = {"sequences": 1, "max_tokens": 1, "logit_rows": 1, "window_blocks": 1, "partial_tokens": 1}
    layers = bare_layers(manifest())
    layers[shape.layers - 1].silent_below = below
    fixed, native = ffi.new("np_fixed *", {"layers": layers}), ffi.new("np_engine_config *", config)
    with pytest.raises(ValueError, match="refuses `silent_below`"):
        create_engine(shape, fixed, ffi.new("np_shared *"), native)
    layers[shape.layers - 1].silent_below = 0.1
    lib.np_engine_destroy(create_engine(shape, fixed, ffi.new("np_shared *"), native))


@pytest.mark.parametrize("name", ["prefill_chunk_tokens", "logit_rows"])
def test_a_step_of_more_tokens_than_sums_by_turns_needs_windows_of_whole_layers(name: str) -> None:
    good = made(ffn_resident_share=0.2)
    assert good.compute.prefill_window_blocks < manifest().layout.blocks
    read = parse_plan(resealed(good, f"compute.{name}", PARTIAL_TOKENS + 1).encode(), "plan.json")
    with pytest.raises(
        UserError, match=f"'compute.{name}': 65, but where a block window is less than a layer, 64 at most"
    ):
        validate(read, manifest(), "plan.json")


def test_a_refused_plan_quotes_a_little_of_what_it_says() -> None:
    good = made(workers=2)
    longest = "b" * 5000
    processes = tuple(
        dataclasses.replace(one, backend=longest) if (one.role, one.index) == ("decode", 1) else one
        for one in good.compute.processes
    )
    wrong = dataclasses.replace(good, compute=dataclasses.replace(good.compute, processes=processes))
    with pytest.raises(UserError, match="decode workers with one backend") as raised:
        validate(wrong, manifest(), "plan.json")
    assert len(str(raised.value)) < 400
