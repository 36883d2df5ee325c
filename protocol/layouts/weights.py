"""Segments of the model: the fixed tensors, the slots of neurons, and the residency entries of clusters."""

from __future__ import annotations

import functools

from neuronpipe.protocol.memory.layout import LINE_WORDS, Fields, Layout

REQUEST_ENTRIES = 16384
"""Length of a participant's request ring, a power of two: what a whole layer of a 7B model can miss."""
MAX_SAMPLED_CLUSTERS = 512
"""Maximum of the clusters whose uses are counted."""
STRIDES = 32
"""Number of distances of these clusters that are compared."""
REUSE_BUCKETS = 128
"""Number of the classes of gaps between two uses of a cluster (np_reuse in native/neuronpipe.h)."""
PIN_STATE = 2
"""Word of the residency segment's `slots` line that has the state of the plan's pins."""


@functools.lru_cache(maxsize=8)
def sampling_stride(clusters: int, ffns: int) -> int:
    """Return the distance of the clusters whose uses are counted.

    It is an odd number that leaves no more than MAX_SAMPLED_CLUSTERS, and at least a quarter of them. Of some such
    numbers it is the smallest whose clusters lie as evenly in the feed-forwards as those of any, since the first
    clusters of a feed-forward are used most.

    ffns: number of feed-forwards, all of which have equally many clusters
    """
    least = -(-clusters // MAX_SAMPLED_CLUSTERS) | 1
    step = 2 * max(1, least // (2 * STRIDES))
    return min(
        range(least, 2 * least, step), key=lambda stride: round(_unevenness(stride, clusters, clusters // ffns), 2)
    )


def _unevenness(stride: int, clusters: int, of_ffn: int) -> float:
    """Return the largest difference between the share of the sampled clusters that precede a place in their
    feed-forward, and the share of all."""
    places = sorted(cluster % of_ffn for cluster in range(0, clusters, stride))
    return max(abs((number + 0.5) / len(places) - (place + 0.5) / of_ffn) for number, place in enumerate(places))


def fixed(*, file_bytes: int, predictor_bytes: int, embedding_rows: int = 0) -> Layout:
    """The fixed tensors: the package's fixed.safetensors byte for byte, then its predictor.safetensors if that is used.
    If the plan leaves the embedding on flash, its quants are zero in the segment, and there is a CRC-32C of each of its
    `embedding_rows` rows, which participants read from the file. The segment is sealed once all is loaded."""
    fields = Fields(
        "fixed",
        1,
        {"file_bytes": file_bytes, "predictor_bytes": predictor_bytes, "embedding_rows": embedding_rows},
    )
    ordering = "written and sealed before `loaded` is set"
    fields.add("file", "u8", "file_bytes", by="loader", to="all", ordering=ordering)
    fields.add("predictor", "u8", "predictor_bytes", by="loader", to="decode, prefill", ordering=ordering)
    fields.add("embedding_checksums", "u32", "embedding_rows", by="loader", to="decode, prefill", ordering=ordering)
    return fields.layout()


def slots(*, trigger_slots: int, trigger_slot_bytes: int, value_slots: int, value_slot_bytes: int) -> Layout:
    """The slots of resident clusters, in two arrays. A trigger slot stores the trigger part of one cluster, a value
    slot the value part: the bytes that the part uses in bundles.bin, rounded up to cache lines of 64 bytes. With
    co-located scales, a value slot ends with the scales of its rows, which lie in the trigger part in bundles.bin."""
    fields = Fields(
        "slots",
        2,
        {
            "trigger_slots": trigger_slots,
            "trigger_slot_bytes": trigger_slot_bytes,
            "value_slots": value_slots,
            "value_slot_bytes": value_slot_bytes,
        },
    )
    for part in ("trigger", "value"):
        fields.add(
            f"{part}_slots",
            "u8",
            f"{part}_slots",
            f"{part}_slot_bytes",
            by="loader",
            to="decode, prefill",
            ordering="the residency entry becomes present (release) after the bytes are written",
        )
    return fields.layout()


def residency(*, clusters: int, ffns: int, participants: int, ring_entries: int = REQUEST_ENTRIES) -> Layout:
    """The residency entries of clusters, and the requests for them. clusters: clusters of all layers and experts, each
    with an entry for either part; ffns: feed-forwards that have these; participants: workers with a read window and a
    request ring, decode workers first, then prefill workers; ring_entries: length of a ring, a power of two. The last
    three fields count, in decode steps of one token, how soon the triggers and the values of sampled clusters are used
    again (np_reuse in native/neuronpipe.h)."""
    lengths = {
        "clusters": clusters,
        "participants": participants,
        "ring_entries": ring_entries,
        "sampled": -(-clusters // sampling_stride(clusters, ffns)),
        "buckets": REUSE_BUCKETS,
    }
    fields = Fields("residency", 3, lengths)
    fields.add(
        "arrivals",
        "u32",
        LINE_WORDS,
        by="loader",
        to="decode, prefill",
        ordering="word 0 is incremented after entries became present or failed (acquire-release), then its sleepers "
        "are woken",
    )
    fields.add(
        "in_flight",
        "u32",
        LINE_WORDS,
        by="loader",
        to="decode, prefill",
        ordering="word 0 is about the number of outstanding reads (release); workers send guesses while it is 0",
    )
    fields.add(
        "loaded",
        "u32",
        LINE_WORDS,
        by="loader",
        to="decode, prefill",
        ordering="word 0 becomes 1 (release) once the fixed tensors are sealed, then its sleepers are woken",
    )
    fields.add(
        "generation",
        "u32",
        LINE_WORDS,
        by="cache",
        to="loader, monitor",
        ordering="word 0 is the generation of the last Reset, stored (release) before it is sent",
    )
    fields.add(
        "slots",
        "u32",
        LINE_WORDS,
        by="cache",
        to="coordinator, monitor",
        ordering="words 0 and 1: present number of trigger and value slots; word 2: 1 while the plan's pins are "
        "released as a trial, 2 once they are released for good, 3 if they stay after it; single words, no order among "
        "them",
    )
    for part in ("trigger", "value"):
        fields.add(
            f"{part}_entries",
            "u32",
            "clusters",
            by="loader, cache; decode and prefill: bit 26",
            to="decode, prefill, loader, cache",
            ordering="atomic; the table of states says who may change what",
        )
    fields.add(
        "windows",
        "u64",
        "participants",
        by="each participant its own read window, for both parts",
        to="cache",
        ordering="sequentially consistent, with a full fence after the store, before entries are looked up",
    )
    fields.add(
        "request_tails",
        "u32",
        "participants",
        LINE_WORDS,
        by="each participant its own",
        to="loader",
        ordering="word 0 counts requests written so far; sequentially consistent, stored after the requests and before "
        "`asleep` is read",
    )
    fields.add(
        "request_heads",
        "u32",
        "participants",
        LINE_WORDS,
        by="loader",
        to="each participant its own",
        ordering="word 0 counts requests taken so far; release, stored after they were read",
    )
    fields.add(
        "requests",
        "u32",
        "participants",
        "ring_entries",
        by="each participant its own, from its tail on",
        to="loader",
        ordering="the tail is advanced after the requests are written, the head after they were read",
    )
    fields.add(
        "asleep",
        "u32",
        LINE_WORDS,
        by="loader: 1 before it sleeps, 0 after; a participant: 0 when it rings the doorbell",
        to="decode, prefill",
        ordering="word 0, sequentially consistent; the loader reads every tail between setting it and sleeping",
    )
    unordered = "single words, no order among them"
    fields.add("last_uses", "u32", 2, "sampled", by="decode", to="supervisor", ordering=unordered)
    fields.add("use_gaps", "u64", 2, "buckets", by="decode", to="supervisor", ordering=unordered)
    fields.add("used_steps", "u64", LINE_WORDS // 2, by="decode", to="supervisor", ordering=unordered)
    return fields.layout()
