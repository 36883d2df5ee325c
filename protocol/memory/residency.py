"""The 32-bit words of the residency segment: entries that locate a part of a cluster, and requests of workers for
clusters.

There is one residency entry per part. Entries are atomic, so a cache hit costs no message. Requests lie in rings, one
per worker. native/neuronpipe.h has the same numbers for C; a test compares them.
"""

from __future__ import annotations

from typing import Final

TRIGGER: Final = 0  # numbers of a cluster's parts, also in messages
VALUE: Final = 1

SLOT_MASK = 0x00FFFFFF
STATE_MASK = 0x03000000
ABSENT = 0x00000000
LOADING = 0x01000000
PRESENT = 0x02000000
FAILED = 0x03000000
REFERENCED = 0x04000000
PINNED = 0x08000000
USE = 0x10000000  # one use, in bits 28-30
SCANNED = 0x80000000

BITS = (
    ("0-23", "slot", "of a present or loading entry: number of the slot; of a failed one: bits 0-23 of the epoch"),
    ("24-25", "state", "0 absent, 1 loading, 2 present, 3 failed"),
    ("26", "referenced", "a worker has looked it up since the cache's clock hand last passed"),
    ("27", "pinned", "not evicted while it is set"),
    (
        "28-30",
        "uses",
        "of a present entry: how often the cache found bit 26 set, less how often clear; 0 after the read",
    ),
    ("31", "scanned", "of a present entry: a long chunk of a prompt has used it, and no worker has looked it up since"),
)
"""Bits of a residency entry, with name and meaning."""

CHANGES = (
    (
        "absent",
        "loading",
        "loader",
        "release; claims the cluster and a granted slot; no other process changes an absent entry",
    ),
    ("loading", "present", "loader", "release, after the bytes are in the slot and match their checksum"),
    ("loading", "failed", "loader", "release, after the third I/O error or the second wrong checksum"),
    ("failed", "absent", "loader", "compare and set, in another epoch than the entry names; it may be requested again"),
    (
        "loading",
        "absent",
        "loader",
        "release, to read the part again; a loader that starts does this to its predecessor's claims",
    ),
    ("present", "absent", "cache", "compare and set of an unreferenced, unpinned entry that no read window covers"),
    ("bit 26 clear", "bit 26 set", "decode, prefill", "sequentially consistent, of a present entry that was looked up"),
    ("bit 31 set", "bit 31 clear", "decode, prefill", "together with bit 26"),
    (
        "bit 26 set",
        "bit 31 set, 26 clear",
        "prefill",
        "sequentially consistent, after a long chunk of a prompt has read the slot for the last time",
    ),
    ("bit 31 set", "bit 31 clear", "cache", "as the clock hand passes; without uses it is evicted before that"),
    ("bit 26 set", "bit 26 clear", "cache", "sequentially consistent, as the clock hand passes; one use more, up to 7"),
    ("bit 26 clear", "one use less", "cache", "sequentially consistent, as the clock hand passes"),
    ("bit 27 clear", "bit 27 set", "loader", "together with present, if a Warm asks for it"),
    ("bit 27 clear", "bit 27 set", "loader, cache", "compare and set of a present entry that is to stay"),
    ("bit 27 set", "bit 27 clear", "cache", "compare and set of a present entry that is to stay no longer"),
)
"""Changes of a residency entry: from, to, by which process, and their memory ordering."""

REQUEST_CLUSTER_MASK = 0x00FFFFFF
REQUEST_TRIGGER = 0x01000000
REQUEST_VALUE = 0x02000000
REQUEST_PREFETCH = 0x04000000
REQUEST_SPECULATIVE = 0x08000000

REQUEST_BITS = (
    ("0-23", "cluster", "its index"),
    ("24", "trigger", "the trigger part is requested"),
    ("25", "value", "the value part is requested"),
    ("26", "prefetch", "the step will need it later; without this bit the step waits for the cluster"),
    (
        "27",
        "guess",
        "the step may need it: read only while nothing else is; dropped when a request without this bit follows",
    ),
    ("28-31", "", "0"),
)
"""Bits of a request, with name and meaning."""
