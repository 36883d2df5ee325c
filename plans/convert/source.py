"""Which kind of source a path is, told from what is there and not from its name."""

from __future__ import annotations

from pathlib import Path

from neuronpipe.plans.convert.advice import refuse_no_source
from neuronpipe.plans.convert.checkpoint import Checkpoint, Options
from neuronpipe.plans.convert.gguf_model import open_gguf
from neuronpipe.plans.convert.huggingface import open_huggingface


def open_checkpoint(path: Path, options: Options) -> Checkpoint:
    """Open a Hugging Face directory or a GGUF file."""
    refuse_no_source(path)
    if path.is_dir():
        return open_huggingface(path, options)
    return open_gguf(path, options)
