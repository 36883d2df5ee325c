"""The 32-bit entries of the residency segment: where a part of a cluster is, and which cluster a worker wants.

There is one residency entry per part, atomic, so that a hit costs no message; request entries lie in rings of workers.
native/neuronpipe.h has the same numbers for C; a test holds the two together.
"""

from __future__ import annotations

from typing import Final

TRIGGER: Final = 0  # the parts of a cluster, as the wire numbers them
VALUE: Final = 1

SLOT_MASK = 0x00FFFFFF
STATE_MASK = 0x03000000
ABSENT = 0x00000000
LOADING = 0x01000000
PRESENT = 0x02000000
FAILED = 0x03000000
REFERENCED = 0x04000000
PINNED = 0x08000000
USE = 0x10000000  # one of the uses

BITS = (
    ("0-23", "slot", "of a present or loading entry: number of the slot; of a failed one: bits 0-23 of the epoch"),
    ("24-25", "state", "0 absent, 1 loading, 2 present, 3 failed"),
    ("26", "referenced", "a worker looked it up since the cache last passed by"),
    ("27", "pinned", "not evicted while it is set"),
    ("28-30", "uses", "of a present entry: how often the cache found it referenced, less how often not; 0 once read"),
    ("31", "", "0"),
)
"""Of a residency entry: bits, name and meaning."""

CHANGES = (
    (
        "absent",
        "loading",
        "loader",
        "release; claims the cluster and a granted slot; nobody else changes an absent entry",
    ),
    ("loading", "present", "loader", "release, after the bytes are in the slot and match their checksum"),
    ("loading", "failed", "loader", "release, after the third I/O error or the second wrong checksum"),
    ("failed", "absent", "loader", "compare and set, in another epoch than the entry names; it may be requested again"),
    (
        "loading",
        "absent",
        "loader",
        "release, to be read again; or when a loader starts: its predecessor's claims",
    ),
    ("present", "absent", "cache", "compare and set of an unreferenced, unpinned entry that no read window covers"),
    ("bit 26 clear", "bit 26 set", "decode, prefill", "sequentially consistent, of a present entry that was looked up"),
    ("bit 26 set", "bit 26 clear", "cache", "sequentially consistent, as the clock's hand passes; a use more, up to 7"),
    ("bit 26 clear", "a use less", "cache", "sequentially consistent, as the clock's hand passes"),
    ("bit 27 clear", "bit 27 set", "loader", "together with present, if a Warm asks for it"),
    ("bit 27 clear", "bit 27 set", "loader, cache", "compare and set of a present entry that is to stay"),
    ("bit 27 set", "bit 27 clear", "cache", "compare and set of a present entry that is to stay no longer"),
)
"""From, to, by whom, and what orders it."""

REQUEST_CLUSTER_MASK = 0x00FFFFFF
REQUEST_TRIGGER = 0x01000000
REQUEST_VALUE = 0x02000000
REQUEST_PREFETCH = 0x04000000
REQUEST_GUESS = 0x08000000

REQUEST_BITS = (
    ("0-23", "cluster", "its index"),
    ("24", "trigger", "the trigger part is wanted"),
    ("25", "value", "the value part is wanted"),
    ("26", "prefetch", "it will be wanted; without this the step waits for the cluster"),
    ("27", "guess", "it may be wanted: read while nothing else is; dropped when an entry without this follows"),
    ("28-31", "", "0"),
)
"""Of an entry of a request ring: bits, name and meaning."""
