"""The version of the wire, which is not the version of the package.

A change that an older peer cannot live with (a field removed or retyped, a new value in a closed list) raises the
major number, which stands in the first frame of every message. A new message, or a new field with a default, raises
the minor number, which travels in `Hello` and `Welcome`.
"""

from __future__ import annotations

MAJOR = 2
MINOR = 0
VERSION = f"{MAJOR}.{MINOR}"
MAGIC = b"NP%d" % MAJOR
