"""Segments of a step: keys and values, and the buffers that the decode workers share."""

from __future__ import annotations

from neuronpipe.protocol.memory.layout import LINE_WORDS, Fields, Layout

NODE_SUMS = "; for an accelerator's blocks only the sums of tree nodes, each in the row of its first block"


def kv(
    *, position_words: int, sequences: int, context_tokens: int, state_slots: int = 0, state_elements: int = 0
) -> Layout:
    """Keys and values: for each layer, sequence and key head first all keys, then all values; or for each layer and
    sequence all latents. Each is a row of fp16 or of q8, as the plan's `kv_type` says; a row of q8 has its fp16 scales
    behind its quants. And the states of recurrent and draft layers. position_words: 16-bit words of a position, in all
    layers; state_slots: states; state_elements: elements of a state, in all layers."""
    fields = Fields(
        "kv",
        4,
        {
            "position_words": position_words,
            "sequences": sequences,
            "context_tokens": context_tokens,
            "state_slots": state_slots,
            "state_elements": state_elements,
        },
    )
    fields.add(
        "kv",
        "u16",
        "position_words",
        "sequences",
        "context_tokens",
        by="decode, accelerator, prefill: the positions of their step; prefill: earlier ones, for a copy_from; loader: "
        "those of a Restore",
        to="decode, prefill, loader",
        ordering="within a step the barrier, between steps StepDone and Prefilled; Saved, Restored",
    )
    fields.add(
        "states",
        "f32",
        "state_slots",
        "state_elements",
        by="decode, prefill: the slots `states_to` of their step",
        to="decode, prefill",
        ordering="within a step the barrier, between steps StepDone and Prefilled",
    )
    return fields.layout()


def exchange(
    *,
    tokens: int,
    width: int,
    output_width: int,
    query_width: int,
    neurons: int,
    blocks: int,
    rank: int,
    claims: int,
    experts_per_token: int,
    groups: int,
    logit_rows: int,
    vocabulary: int,
    workers: int,
    lane_words: int,
    drafts: bool = False,
) -> Layout:
    """The buffers of a decode step, which its participants share. tokens: maximum of one decode step; pairs: a pair is
    a token and one of its experts; groups: maximal number of experts that are computed at once; output_width: width if
    outputs of attention and feed-forward are normed, twice that with norms of branches, else 0; query_width:
    query_heads * head_width, or more with latents, gates or a draft layer; neurons: neurons of one expert's blocks,
    padding included; rank: rank of the predictor, 0 without one;
    claims: number of counters by which participants claim pieces of work; logit_rows: maximal number of tokens of a
    decode or prefill step whose logits are needed; workers: decode workers, each of which has a step channel of
    lane_words; drafts: true if the model has a draft layer."""
    fields = Fields(
        "exchange",
        5,
        {
            "tokens": tokens,
            "pairs": tokens * experts_per_token,
            "groups": groups,
            "width": width,
            "output_width": output_width,
            "query_width": query_width,
            "neurons": neurons,
            "blocks": blocks,
            "rank": rank,
            "claims": claims,
            "mask_bytes": -(-tokens // 8) if rank else 0,
            "logit_rows": logit_rows,
            "vocabulary": vocabulary,
            "workers": workers,
            "lane_words": lane_words,
            "drafted": tokens if drafts else 0,
        },
    )
    fields.add(
        "epoch",
        "u32",
        LINE_WORDS,
        by="supervisor, coordinator",
        to="decode, prefill",
        ordering="word 0, acquire-release; after a change the sleepers of barriers and arrivals are woken",
    )
    _add_stages(fields, "pairs", "decode")
    fields.add(
        "logits",
        "f32",
        "logit_rows",
        "vocabulary",
        by="decode: own columns; prefill: all",
        to="coordinator; the client of a Score",
        ordering="StepDone, Prefilled and Scored are sent after the rows are written; a client releases them by Next",
    )
    fields.add(
        "lanes",
        "u32",
        "workers",
        "lane_words",
        by="coordinator: steps; decode: its answers; both: state",
        to="decode, coordinator",
        ordering="section 6.2",
    )
    fields.add(
        "finished",
        "u32",
        LINE_WORDS,
        by="decode, coordinator",
        to="coordinator",
        ordering="section 6.2; word 0 counts steps, word 1 its sleepers; sequentially consistent",
    )
    fields.add(
        "drafted",
        "u32",
        "drafted",
        by="decode: participant 0",
        to="coordinator",
        ordering="StepDone; the drafted tokens of the step, in order",
    )
    return fields.layout()


def prefill_stage(
    *,
    tokens: int,
    partial_tokens: int,
    width: int,
    output_width: int,
    query_width: int,
    neurons: int,
    blocks: int,
    rank: int,
    claims: int,
    experts_per_token: int,
    groups: int,
) -> Layout:
    """The buffers of a prefill step's stages, as in `exchange`, in the memory of the process whose threads compute the
    step; not a segment. partial_tokens: maximal number of tokens whose block sums are in memory at once."""
    fields = Fields(
        "prefill_stage",
        8,
        {
            "tokens": tokens,
            "pairs": tokens * experts_per_token,
            "groups": groups,
            "partial_pairs": partial_tokens * experts_per_token,
            "width": width,
            "output_width": output_width,
            "query_width": query_width,
            "neurons": neurons,
            "blocks": blocks,
            "rank": rank,
            "claims": claims,
            "mask_bytes": -(-tokens // 8) if rank else 0,
        },
    )
    _add_stages(fields, "partial_pairs", "prefill")
    return fields.layout()


def _add_stages(fields: Fields, partial_pairs: str, who: str) -> None:
    """Add the buffers of a step's stages, which the participants share. who: the role of the participants."""
    zeroed_by = "coordinator" if who == "decode" else "prefill"
    fields.add(
        "barriers",
        "u32",
        1,
        LINE_WORDS,
        by=who,
        to=who,
        ordering="section 6.1; words 0 arrived, 1 phase, 2 waiters; reset by the coordinator before each attempt",
    )
    for name, dimensions in (
        ("residual", ("tokens", "width")),
        ("queries", ("tokens", "query_width")),
        ("attention", ("tokens", "query_width")),
        ("hidden", ("pairs", "neurons")),
        ("partials", (partial_pairs, "blocks", "width")),
        ("changes", ("tokens", "output_width")),
        ("ranks", ("pairs", "rank")),
    ):
        has_nodes = name == "partials" and who == "decode"
        fields.add(
            name,
            "f32",
            *dimensions,
            by=f"{who}: own ranges",
            to=who,
            ordering="the barrier between the stages of a layer" + (NODE_SUMS if has_nodes else ""),
        )
    fields.add(
        "predicted",
        "u8",
        "groups",
        "neurons",
        "mask_bytes",
        by=f"{who}: the blocks that each claimed",
        to=who,
        ordering="the barrier between the stages of a layer; bit t%8 of byte t/8 belongs to the expert's token t",
    )
    fields.add(
        "claims",
        "u32",
        "claims",
        by=f"{zeroed_by} zeroes them before a step; {who}",
        to=who,
        ordering="section 6.1; relaxed fetch-and-add, since barriers order the work itself",
    )
