"""The planner: what fits is used, what does not is refused with the figure that would fit, and plans are checked."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from neuronpipe.plans.package.layout import compute_layout
from neuronpipe.plans.package.manifest import FileEntry, Manifest, Shape, Source
from neuronpipe.plans.plan.account import MIB, account
from neuronpipe.plans.plan.explain import explain
from neuronpipe.plans.plan.facts import decode_shares
from neuronpipe.plans.plan.plan import Plan, Seat, parse_plan, read_plan
from neuronpipe.plans.plan.planner import DeviceFacts, Wanted, plan
from neuronpipe.protocol.errors import UserError

GIB = 1 << 30


def manifest(*, width: int = 320, neurons: int = 1024, layers: int = 8, order: str = "source") -> Manifest:
    shape = Shape(
        width=width,
        neurons=neurons,
        layers=layers,
        experts=1,
        query_heads=5,
        key_heads=1,
        head_width=64,
        vocabulary=4096,
        context_tokens=512,
        norm_epsilon=1e-5,
        window_tokens=0,
    )
    return Manifest(
        name="m",
        source=Source("huggingface", "m", "LlamaForCausalLM"),
        activation="drelu",
        quantization="q8",
        shape=shape,
        attention_bias=False,
        tied_embeddings=True,
        end_tokens=(0,),
        layout=compute_layout("q8", width, neurons, order),  # type: ignore[arg-type]
        files={"fixed.safetensors": FileEntry(3 * MIB, "0" * 64), "tokenizer.json": FileEntry(MIB // 4, "0" * 64)},
        quantization_error={},
        activity_by_layer=None,
    ).sealed()


def device(workers: int = 2, memory_bytes: int = GIB) -> DeviceFacts:
    shares = decode_shares([1024] * workers)
    seats = [Seat(role=role, index=0, core=None) for role in ("coordinator", "loader", "cache", "prefill")]
    seats += [Seat(role="decode", index=n, core=n, share_from=a, share_to=b) for n, (a, b) in enumerate(shares)]
    return DeviceFacts(
        id="d", memory_bytes=memory_bytes, flash_engine="threads", flash_bytes_per_s=1e9, seats=tuple(seats)
    )


def least_bytes(made_for: Manifest, facts: DeviceFacts) -> int:
    return plan(made_for, facts, Wanted()).memory.least_bytes


def test_with_memory_to_spare_everything_is_resident_and_nothing_is_read() -> None:
    made = plan(manifest(), device(), Wanted())
    assert made.memory.everything_resident
    assert made.expected.flash_bytes_per_token == 0


def test_gates_are_kept_before_up_and_down_because_every_token_reads_them() -> None:
    m = manifest()
    made = plan(m, device(), Wanted(ffn_resident_share=0.5))
    assert made.memory.gate_slots == m.words
    assert made.memory.pinned_gates_per_layer == m.layout.clusters
    assert made.memory.rest_slots < m.words


@pytest.mark.parametrize("share", [0.9, 0.5, 0.34, 0.2, 0.1])
def test_the_resident_share_that_was_asked_for_is_not_exceeded(share: float) -> None:
    memory = plan(manifest(), device(), Wanted(ffn_resident_share=share)).memory
    assert memory.slots_bytes <= share * memory.ffn_bytes


def test_a_limit_below_the_least_is_refused_and_the_figure_in_the_message_works() -> None:
    m, facts = manifest(), device()
    least = least_bytes(m, facts)
    with pytest.raises(UserError, match=f"{least:,} bytes"):
        plan(m, facts, Wanted(memory_bytes=least - 1))
    assert plan(m, facts, Wanted(memory_bytes=least)).memory.total_bytes() <= least


@given(tokenizer_bytes=st.integers(1, 10 * MIB))
def test_the_least_is_the_least_to_the_byte(tokenizer_bytes: int) -> None:
    m, facts = manifest(), device()
    m = dataclasses.replace(m, files={**m.files, "tokenizer.json": FileEntry(tokenizer_bytes, "0" * 64)})
    least = least_bytes(m, facts)
    assert plan(m, facts, Wanted(memory_bytes=least)).memory.least_bytes == least
    with pytest.raises(UserError, match="the least for this package"):
        plan(m, facts, Wanted(memory_bytes=least - 1))


def test_a_resident_share_too_small_for_one_block_per_worker_is_refused() -> None:
    with pytest.raises(UserError, match=r"--ffn-resident 1\.0%: the least"):
        plan(manifest(), device(), Wanted(ffn_resident_share=0.01))


@settings(max_examples=150, deadline=None)
@given(
    extra=st.integers(0, 12 * MIB),
    workers=st.integers(1, 5),
    neurons=st.integers(1, 3000),
    layers=st.integers(1, 13),
    order=st.sampled_from(["source", "frequency"]),
)
def test_every_accepted_limit_holds_and_leaves_room_for_what_is_moving(
    extra: int, workers: int, neurons: int, layers: int, order: str
) -> None:
    m, facts = manifest(neurons=neurons, layers=layers, order=order), device(workers)
    least = least_bytes(m, facts)
    made = plan(m, facts, Wanted(memory_bytes=least + extra))
    memory, layout = made.memory, m.layout
    assert memory.total_bytes() <= memory.limit_bytes
    if memory.everything_resident:
        return
    open_clusters = workers * made.compute.decode_window_blocks * layout.block_clusters
    assert made.compute.prefill_window_blocks * layout.block_clusters <= max(open_clusters, layout.block_clusters)
    for slots, pinned in (
        (memory.gate_slots, memory.pinned_gates_per_layer),
        (memory.rest_slots, memory.pinned_rests_per_layer),
    ):
        assert slots <= m.words
        assert pinned * layers <= slots
        assert slots == m.words or slots - pinned * layers >= min(open_clusters, m.words), (
            "a window must fit beside the pinned"
        )


def test_a_plan_survives_its_file_and_explains_itself(tmp_path: Path) -> None:
    made = plan(manifest(), device(), Wanted(ffn_resident_share=0.5))
    file = tmp_path / "plan.json"
    file.write_text(made.to_json())
    assert read_plan(file) == made
    assert made.id in explain(made)
    assert "decode.1" in explain(made)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"version": 2}, "'version'"),
        ({"compute": 3}, "'compute.'"),
        ({"surprise": 1}, "'surprise' is unknown"),
        ({"device_id": "other"}, "'id' does not match"),
    ],
)
def test_a_damaged_plan_is_refused_naming_the_field(change: dict[str, object], complaint: str) -> None:
    data = json.loads(plan(manifest(), device(), Wanted()).to_json()) | change
    with pytest.raises(UserError, match=complaint):
        parse_plan(json.dumps(data), "plan.json")


def test_a_plan_for_another_package_is_refused_with_the_command_that_makes_the_right_one() -> None:
    made: Plan = plan(manifest(), device(), Wanted())
    made.check(package_id=made.package_id, device_id="d", where="plan.json")
    with pytest.raises(UserError, match=r"neuronpipe plan PACKAGE -o plan\.json"):
        made.check(package_id="another", device_id="d", where="plan.json")


def test_the_same_wishes_give_the_same_plan_and_other_wishes_another_id() -> None:
    one, two = (plan(manifest(), device(), Wanted()) for _ in range(2))
    assert one.id == two.id
    assert dataclasses.replace(one, device_id="e").id != one.id


def test_shares_follow_the_cores_and_cover_everything() -> None:
    shares = decode_shares([1024, 512, 512])
    assert shares == [(0.0, 0.5), (0.5, 0.75), (0.75, 1.0)]


def test_the_account_grows_with_scores_sampling_and_the_logits_prefill_is_asked_for() -> None:
    m = manifest()
    seats = {"processes": 6, "sequences": 1}
    small = account(m, **seats, workers=2, context_tokens=64, prefill_chunk_tokens=1, logit_rows=8).private_bytes
    assert (
        small == account(m, **seats, workers=2, context_tokens=64, prefill_chunk_tokens=8, logit_rows=8).private_bytes
    )
    longer = account(m, **seats, workers=2, context_tokens=512, prefill_chunk_tokens=1, logit_rows=8).private_bytes
    assert longer - small == 4 * (512 - 64) * 3
    words = dataclasses.replace(m, shape=dataclasses.replace(m.shape, vocabulary=m.shape.vocabulary + 1000))
    more = account(words, **seats, workers=2, context_tokens=64, prefill_chunk_tokens=1, logit_rows=8).private_bytes
    assert more - small == 8 * 1000
