"""Loading the fixed tensors: into their segment, verified, then sealed for good."""

from __future__ import annotations

import hashlib

from neuronpipe.plans.package.manifest import FIXED
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.segments import Segment

BLOCK_BYTES = 4 << 20


def load_fixed(package: Package, segment: Segment) -> None:
    """Copy fixed.safetensors into the segment and seal it; nothing to do when an earlier loader has. Verifies the
    tokenizer, the checksum table and the tensors (UserError naming the file)."""
    if segment.sealed:
        return
    package.verify_fixed()
    digest = hashlib.sha256()
    path = package.fixed_path
    with segment.map(writable=True) as mapping, path.open("rb", buffering=0) as file:
        target = mapping.view("file")
        at = 0
        while at < len(target):
            read = file.readinto(target[at : at + BLOCK_BYTES])
            if not read:
                raise UserError(
                    f"{path}: ended after {at} of {len(target)} bytes while it was loaded; is it being replaced?"
                )
            digest.update(target[at : at + read])
            at += read
    if digest.hexdigest() != package.manifest.files[FIXED].sha256:
        raise UserError(f"{path}: changed while it was loaded: it no longer matches the manifest's sha256")
    segment.seal()
