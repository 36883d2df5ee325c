"""Entries of the request rings: which cluster a worker wants, and how badly. 32 bits each.

native/neuronpipe.h has the same numbers for C; a test holds the two together.
"""

from __future__ import annotations

CLUSTER_MASK = 0x00FFFFFF
TRIGGER = 0x01000000
VALUE = 0x02000000
PREFETCH = 0x04000000

BITS = (
    ("0-23", "cluster", "its index"),
    ("24", "trigger", "the trigger part is wanted"),
    ("25", "value", "the value part is wanted"),
    ("26", "prefetch", "a guess; without it the step waits for the cluster"),
    ("27-31", "", "0"),
)
"""Bits, name and meaning."""
