"""Loading the fixed tensors: into their segment, verified, then sealed for good."""

from __future__ import annotations

from neuronpipe.plans.package.manifest import FIXED, PREDICTOR
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.segments import Segment


def load_fixed(package: Package, segment: Segment) -> None:
    """Copy fixed.safetensors, and in predicted mode predictor.safetensors, into the segment and seal it; nothing to do
    when an earlier loader has. Verifies the tokenizer, the checksum table and the tensors (UserError naming
    the file)."""
    if segment.sealed:
        return
    with segment.map(writable=True) as mapping:
        targets = {FIXED: mapping.view("file"), PREDICTOR: mapping.view("predictor")}
        loaded = {name: target for name, target in targets.items() if len(target)}
        package.verify_fixed(loaded=loaded.keys())
        for name, target in loaded.items():
            package.load(name, target)
        for target in targets.values():
            target.release()
    segment.seal()
