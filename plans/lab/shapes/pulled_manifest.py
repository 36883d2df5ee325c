"""The manifest of the package that `pull` makes of a model of the catalog or of a shape, without downloading anything.

Quantizations follow the rules of `convert` (plans/quantization_choice.py), with the encodings that a type of GGUF files
has for each matrix. Nothing is measured in a new package: it has no activity profile. The shares of neurons that fire
are those of the shape of this name, if there is one, as the simulator takes them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from neuronpipe.plans.lab.shapes.models import SimulatedModel, model_named, shape_named
from neuronpipe.plans.lab.shapes.shape_manifest import TOKEN_BYTES, manifest_of_shape, with_file_lengths
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.number_format import show_number
from neuronpipe.plans.package.layout import Quantization
from neuronpipe.plans.package.manifest import (
    EMBEDDINGS,
    PREDICTOR_QUANTIZATIONS,
    Manifest,
    Predictor,
    Source,
    package_rank,
)
from neuronpipe.plans.package.model_layout import layout_of_model, slices_of_model
from neuronpipe.plans.package.tensors import fixed_matrices
from neuronpipe.plans.pull.catalog import CatalogModel, FileType, catalog_model
from neuronpipe.plans.quantization_choice import (
    attention_quantization,
    default_quantization,
    ends_quantization,
    kept_quantization,
    recipe_for,
)
from neuronpipe.protocol.frozen import frozen


@frozen(kw_only=True)
class FileEncodings:
    """The encodings of the matrices of a file. The numbers of weights matter little: they only rank encodings.

    weights: encoding of most weights
    down: encodings of Down
    attention: encoding of attention's matrices; some have more bits, which costs little memory and is not counted
    ends: encoding of the output matrix, and of an embedding that is the same
    """

    weights: str
    down: tuple[str, ...]
    attention: str
    ends: str


def _of_one(encoding: str) -> FileEncodings:
    return FileEncodings(weights=encoding, down=(encoding,), attention=encoding, ends=encoding)


# llama-quantize mixes types in files of K-quants, and files of gpt-oss have all but the experts in Q8_0.
FILE_ENCODINGS: Mapping[FileType, FileEncodings] = {
    "BF16": _of_one("BF16"),
    "Q8_0": _of_one("Q8_0"),
    "Q4_K_M": FileEncodings(weights="Q4_K", down=("Q4_K", "Q6_K"), attention="Q4_K", ends="Q6_K"),
    "Q4_K_S": FileEncodings(weights="Q4_K", down=("Q4_K", "Q5_K"), attention="Q4_K", ends="Q6_K"),
    "MXFP4": FileEncodings(weights="MXFP4", down=("MXFP4",), attention="Q8_0", ends="Q8_0"),
}


def manifest_of_pulled(model: CatalogModel) -> Manifest:
    """Return the manifest of the package that `pull` makes of this model. Raises UserError as `CatalogModel.spec`."""
    spec, encodings = model.spec, FILE_ENCODINGS[model.file_type]
    weights = {encodings.weights: 1}
    quantization = default_quantization(weights)
    manifest = Manifest(
        name=model.name,
        source=Source("gguf" if model.file else "huggingface", model.reference, spec.family),
        model=spec,
        quantization=quantization,
        end_tokens=(),
        layout=layout_of_model(
            spec,
            quantization,
            "source",
            differing={
                "down": _down_quantization(spec, quantization, encodings, has_predictor=model.predictor_rank > 0)
            },
            by_neuron=model.predictor_rank > 0,
        ),
        files={},
        quantization_error={},
        fired_by_layer=_fired_by_layer(model.name, spec),
        predictor=_predictor(model, spec, quantization) if model.predictor_rank else None,
        quantizations=_fixed_quantizations(spec, quantization, encodings),
        compact_tokenizer=True,
    )
    return with_file_lengths(manifest)


def manifest_of_pulled_shape(shape: SimulatedModel) -> Manifest:
    """Return the manifest of the package that `pull` makes of a shape.

    A shape that is not in the catalog is taken to come in 16 bits. It then has a predictor if its activation is dReLU,
    and neurons in order of frequency unless it is SiLU, as after `profile`.
    """
    if (model := catalog_model(shape.name)) is not None:
        return manifest_of_pulled(model)
    manifest, encodings = manifest_of_shape(shape), FILE_ENCODINGS["BF16"]
    quantization = default_quantization({encodings.weights: 1})
    down = _down_quantization(shape.spec, quantization, encodings, has_predictor=manifest.predictor is not None)
    return with_file_lengths(
        replace(
            manifest,
            quantization=quantization,
            layout=layout_of_model(shape.spec, quantization, manifest.layout.neuron_order, differing={"down": down}),
            quantizations=_fixed_quantizations(shape.spec, quantization, encodings),
        )
    )


def shape_assumptions(shape: SimulatedModel, manifest: Manifest) -> Iterator[str]:
    """Yield what a plan for a shape has to state. manifest: from `manifest_of_pulled_shape`"""
    fires = f"{show_number(100 * shape.active)} % of a feed-forward's neurons are taken to fire"
    if manifest.predictor is not None:
        fires += f", and a predictor of rank {shape.predictor_rank:,} to name {show_number(100 * shape.predicted)} %"
    model = catalog_model(shape.name)
    source = f"16-bit weights of {shape.name}" if model is None else f"{model.reference}, {model.file_type}"
    yield (
        f"for the {manifest.quantization} package that `pull` makes of {source}: {fires}; a tokenizer is taken to have "
        f"{TOKEN_BYTES} bytes a token"
    )


def _fired_by_layer(name: str, spec: ModelSpec) -> tuple[float, ...] | None:
    if spec.all_neurons_fire or shape_named(name) is None:
        return None
    return (model_named(name).active,) * spec.layers


def _down_quantization(
    spec: ModelSpec, quantization: Quantization, encodings: FileEncodings, *, has_predictor: bool
) -> Quantization:
    recipe = recipe_for(quantization, {encodings.weights: 1}, down_by_neuron=False)
    if has_predictor or not slices_of_model(spec):
        return recipe.down
    return kept_quantization(dict.fromkeys(encodings.down, 1)) or recipe.down


def _fixed_quantizations(
    spec: ModelSpec, quantization: Quantization, encodings: FileEncodings
) -> dict[str, Quantization]:
    weights = {encodings.weights: 1}
    recipe = recipe_for(quantization, weights, down_by_neuron=False)
    quantizations = {}
    for name, _, _ in fixed_matrices(spec):
        if name in EMBEDDINGS:
            is_looked_up = name == "embedding" and not spec.tied_embeddings
            encoding = encodings.weights if is_looked_up and encodings.weights != "MXFP4" else encodings.ends
            of_matrix = ends_quantization(
                quantization, recipe, {encoding: 1}, is_looked_up=is_looked_up, is_default=True
            )
        else:
            of_matrix = attention_quantization(
                quantization, weights, {encodings.attention: 1}, may_differ=spec.all_neurons_fire
            )
        if of_matrix != quantization:
            quantizations[name] = of_matrix
    return quantizations


def _predictor(model: CatalogModel, spec: ModelSpec, quantization: Quantization) -> Predictor:
    return Predictor(
        rank=package_rank(model.predictor_rank),
        quantization=quantization if quantization in PREDICTOR_QUANTIZATIONS else "q4",
        reads="residual",
        sides=(spec.trigger,),
        hidden="relu",
        calibration_tokens=0,
        by_layer=(),
    )
