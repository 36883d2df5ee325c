"""Segments of the model: the fixed tensors, the slots of neurons, and which cluster lies where."""

from __future__ import annotations

from neuronpipe.protocol.layout import LINE_WORDS, Fields, Layout

REQUEST_ENTRIES = 16384
"""Entries of a member's ring of requests: what a whole layer of a 7B model misses. A power of two."""


def fixed(*, file_bytes: int, predictor_bytes: int) -> Layout:
    """The fixed tensors: the package's fixed.safetensors, byte for byte, and its predictor.safetensors in predicted
    mode (else of no bytes); sealed once they are loaded."""
    fields = Fields("fixed", 1, {"file_bytes": file_bytes, "predictor_bytes": predictor_bytes})
    ordering = "written and sealed before `loaded` is set"
    fields.add("file", "u8", "file_bytes", by="loader", to="all", ordering=ordering)
    fields.add("predictor", "u8", "predictor_bytes", by="loader", to="decode, prefill", ordering=ordering)
    return fields.layout()


def slots(*, gate_slots: int, gate_slot_bytes: int, rest_slots: int, rest_slot_bytes: int) -> Layout:
    """Neuron slots: what is resident of bundles.bin, of each part the bytes that are used, in whole cache lines."""
    fields = Fields(
        "slots",
        2,
        {
            "gate_slots": gate_slots,
            "gate_slot_bytes": gate_slot_bytes,
            "rest_slots": rest_slots,
            "rest_slot_bytes": rest_slot_bytes,
        },
    )
    for part in ("gate", "rest"):
        fields.add(
            f"{part}_slots",
            "u8",
            f"{part}_slots",
            f"{part}_slot_bytes",
            by="loader",
            to="decode, prefill",
            ordering="the residency word becomes present (release) after the bytes are there",
        )
    return fields.layout()


def residency(*, words: int, members: int, entries: int = REQUEST_ENTRIES) -> Layout:
    """Which cluster is where, and which are wanted. words: layers * experts * clusters, for each part; members: workers
    with a window and a ring of requests, decode workers first, then prefill workers; entries: of a ring, a power of
    two."""
    fields = Fields("residency", 3, {"words": words, "members": members, "entries": entries})
    fields.add(
        "arrivals",
        "u32",
        LINE_WORDS,
        by="loader",
        to="decode, prefill",
        ordering="word 0 grows after words became present or failed (acquire-release), then its sleepers are woken",
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
    for part in ("gate", "rest"):
        fields.add(
            f"{part}_words",
            "u32",
            "words",
            by="loader, cache; decode and prefill the reference bit",
            to="decode, prefill, loader, cache",
            ordering="atomic; the table of states says who may change what",
        )
    fields.add(
        "windows",
        "u64",
        2,
        "members",
        by="each member its own, of either part",
        to="cache",
        ordering="sequentially consistent, with a full fence after the store, before the words are looked up",
    )
    fields.add(
        "request_tails",
        "u32",
        "members",
        LINE_WORDS,
        by="each member its own",
        to="loader",
        ordering="word 0 counts entries ever put; sequentially consistent, between the entries and a look at `asleep`",
    )
    fields.add(
        "request_heads",
        "u32",
        "members",
        LINE_WORDS,
        by="loader",
        to="each member its own",
        ordering="word 0 counts entries ever taken; release, after they were read",
    )
    fields.add(
        "requests",
        "u32",
        "members",
        "entries",
        by="each member its own, from its tail on",
        to="loader",
        ordering="the tail is advanced after the entries are there, the head after they were read",
    )
    fields.add(
        "asleep",
        "u32",
        LINE_WORDS,
        by="loader 1 before it sleeps, 0 after; a member 0 when it rings",
        to="decode, prefill",
        ordering="word 0, sequentially consistent; the loader looks at every tail between setting it and sleeping",
    )
    return fields.layout()
