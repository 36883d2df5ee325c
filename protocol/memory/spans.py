"""Spans of the trace: what a process did in a period. Each process writes its spans to a ring of its own.

native/neuronpipe.h has the same numbers for C; a test compares them.
"""

from __future__ import annotations

from typing import NamedTuple

SPAN_BYTES = 32

FIELDS = (
    ("0", "start_ns", "8 bytes; start, by the monotonic clock"),
    ("8", "end_ns", "8 bytes; end; the spans of a ring are in this order"),
    ("16", "kind", "2 bytes; number of a kind"),
    ("18", "layer", "2 bytes; 0 if there is none"),
    ("20", "value", "4 bytes; its meaning depends on the kind"),
    ("24", "step", "8 bytes; number of the step, as in `Step` and `Prefill`; 0 if there is none"),
)
"""Fields of a span, little-endian: offset in bytes, name, size and meaning."""


class Kind(NamedTuple):
    """A kind of span.

    by: the roles that write it
    value: the meaning of a span's `value`; empty if it has none
    """

    number: int
    name: str
    by: str
    meaning: str
    value: str


KINDS = (
    Kind(1, "step", "decode, prefill", "a whole step; contains the spans below", "tokens"),
    Kind(2, "qkv", "decode, prefill", "heads of queries, keys and values", ""),
    Kind(3, "attend", "decode, prefill", "attention of some heads", ""),
    Kind(4, "project", "decode, prefill", "rows of the attention's output", ""),
    Kind(5, "predict", "decode, prefill", "predicting which neurons will fire", "neurons predicted"),
    Kind(6, "neurons", "decode, prefill", "neurons of some blocks", "neurons fired"),
    Kind(7, "combine", "decode, prefill", "adding block sums to the residual stream", ""),
    Kind(8, "logits", "decode, prefill", "rows of the output matrix", ""),
    Kind(9, "barrier", "decode, prefill", "waiting for other participants", ""),
    Kind(10, "flash", "decode, prefill", "waiting for clusters to arrive", "blocks still to come"),
    Kind(11, "read", "loader", "reads in flight", "bytes landed"),
    Kind(12, "evict", "cache", "taking slots from clusters", "slots freed"),
    Kind(13, "send", "coordinator", "sending a step", "participants"),
    Kind(14, "await", "coordinator", "from the last message sent to the last answer", "tokens"),
    Kind(15, "sample", "coordinator", "reading logits and sampling tokens", "tokens"),
    Kind(
        16,
        "tell",
        "coordinator",
        "all work between a step's logits and the next step: detokenizing, messages",
        "messages",
    ),
)
"""All kinds of spans, in the order of their numbers."""
