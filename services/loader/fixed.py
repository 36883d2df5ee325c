"""Loading the fixed tensors: into their segment, verified, then sealed for good."""

from __future__ import annotations

import hashlib
from pathlib import Path

from neuronpipe.plans.package.manifest import FIXED, PREDICTOR
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.segments import Segment

BLOCK_BYTES = 4 << 20


def load_fixed(package: Package, segment: Segment) -> None:
    """Copy fixed.safetensors, and in predicted mode predictor.safetensors, into the segment and seal it; nothing to do
    when an earlier loader has. Verifies the tokenizer, the checksum table and the tensors (UserError naming
    the file)."""
    if segment.sealed:
        return
    package.verify_fixed()
    with segment.map(writable=True) as mapping:
        _load(package.fixed_path, package.manifest.files[FIXED].sha256, mapping.view("file"))
        predictor = mapping.view("predictor")
        if len(predictor):
            _load(package.predictor_path, package.manifest.files[PREDICTOR].sha256, predictor)
        predictor.release()
    segment.seal()


def _load(path: Path, sha256: str | None, target: memoryview) -> None:
    digest = hashlib.sha256()
    at = 0
    with path.open("rb", buffering=0) as file:
        while at < len(target):
            read = file.readinto(target[at : at + BLOCK_BYTES])
            if not read:
                raise UserError(
                    f"{path}: ended after {at} of {len(target)} bytes while it was loaded; is it being replaced?"
                )
            digest.update(target[at : at + read])
            at += read
    target.release()
    if digest.hexdigest() != sha256:
        raise UserError(f"{path}: changed while it was loaded: it no longer matches the manifest's sha256")
