"""The manifest of the package that `synth` makes of a shape, without making it.

Files have the sizes of a q4 package; that of the tokenizer is assumed. The shares of firing and predicted neurons are
the simulator's. Neurons are ordered by frequency unless the activation is SiLU.
"""

from __future__ import annotations

from dataclasses import replace

from neuronpipe.plans.lab.shapes.models import SimulatedModel
from neuronpipe.plans.package.layout import NeuronOrder
from neuronpipe.plans.package.manifest import (
    BUNDLES,
    CHECKSUMS,
    FIXED,
    PREDICTOR,
    TOKENIZER,
    FileEntry,
    Manifest,
    Predictor,
    PredictorQuality,
    Source,
    package_rank,
)
from neuronpipe.plans.package.model_layout import layout_of_model
from neuronpipe.plans.package.safetensors_header import file_bytes
from neuronpipe.plans.package.tensors import fixed_tensors, predictor_tensors

CHECKSUM_BYTES = 8  # of a cluster
TOKEN_BYTES = 64  # of tokenizer.json per token; published files have 56 (Llama 2) to 139 (gpt-oss)


def manifest_of_shape(shape: SimulatedModel) -> Manifest:
    """Return the manifest of a q4 package of a shape, with a predictor if its activation is dReLU."""
    spec = shape.spec
    order: NeuronOrder = "source" if spec.all_neurons_fire else "frequency"
    layout = layout_of_model(spec, "q4", order)
    predictor = _predictor(shape) if spec.activation == "drelu" else None
    manifest = Manifest(
        name=shape.name,
        source=Source("synthetic", shape.name, spec.activation),
        model=spec,
        quantization="q4",
        end_tokens=(),
        layout=layout,
        files={},
        quantization_error={},
        fired_by_layer=(shape.active,) * spec.layers,
        predictor=predictor,
        compact_tokenizer=True,
    )
    return with_file_lengths(manifest)


def with_file_lengths(manifest: Manifest) -> Manifest:
    """Return the sealed manifest with its files and their lengths; that of the tokenizer is assumed."""
    clusters = manifest.clusters
    lengths = {
        TOKENIZER: TOKEN_BYTES * manifest.model.vocabulary,
        FIXED: file_bytes(fixed_tensors(manifest)),
        BUNDLES: clusters * manifest.layout.cluster_stride_bytes,
        CHECKSUMS: clusters * CHECKSUM_BYTES,
    }
    if manifest.predictor is not None:
        lengths[PREDICTOR] = file_bytes(predictor_tensors(manifest.model, manifest.predictor))
    return replace(manifest, files={name: FileEntry(length, None) for name, length in lengths.items()}).sealed()


def _predictor(shape: SimulatedModel) -> Predictor:
    quality = PredictorQuality(recall=1.0, precision=shape.active / shape.predicted, predicted=shape.predicted)
    return Predictor(
        rank=package_rank(shape.predictor_rank),
        quantization="q4",
        reads="attention" if shape.spec.experts == 1 else "feed_forward",
        sides=("gate",),
        hidden="none",
        calibration_tokens=0,
        by_layer=(quality,) * shape.spec.layers,
    )
