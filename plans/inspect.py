"""Describes a package, as JSON values and as text for people. Reads the manifest only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from neuronpipe.plans.cost.activation_rates import ranks, unmeasured_predictor
from neuronpipe.plans.cost.read_sizes import read_units
from neuronpipe.plans.device.device import FlashCurve
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.activity_profile import interpolated
from neuronpipe.plans.package.layout import Part
from neuronpipe.plans.package.manifest import DEFAULT_RECALL, PREDICTOR, Manifest, Predictor
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.safetensors_header import DTYPE_BYTES
from neuronpipe.plans.package.source_experts import SHARED
from neuronpipe.plans.package.tensors import fixed_matrices, fixed_tensors, fixed_vectors
from neuronpipe.plans.plan.document import Plan
from neuronpipe.plans.plan.segment_sizes import STATE_ELEMENT_BYTES
from neuronpipe.plans.quantization_choice import why
from neuronpipe.protocol.errors import escaped

BAR_WIDTH = 64
MIB = 1 << 20
MAX_RECALL_SHORTFALL = 0.005  # below the target recall; calibration and held-out text can differ by this much
ALWAYS_FIRES = (
    "every neuron fires for every token, so every token reads all weights: nothing is sparse here, and memory "
    "below the model's size costs speed; ReLU models (ReluLLaMA, Bamboo, TurboSparse) read a part"
)
LEAVES_OUT = (
    "; of a package that was converted --by-neuron, `neuronpipe profile PACKAGE --silent 50% --text FILE` and "
    "--mode thresholded leave out a part, at a loss"
)
CHOSEN_FIRE = (
    "every neuron of a chosen expert fires, so a token reads {share:.0%} of the feed-forward weights, expert by "
    "expert; nothing inside an expert is sparse"
)
NO_TEMPLATE = "no template, as base models have none; `neuronpipe convert --chat-template FILE` gives it one"


def describe(package: Package, curve: FlashCurve | None = None) -> dict[str, Any]:
    """Return a description of a package as JSON values: the manifest's facts, bytes by kind, the pieces of clusters.

    curve: speeds of the package's flash, from which "reading" follows: the bytes to read together. None: "reading" is
        None
    """
    manifest = package.manifest
    model, layout = manifest.model, manifest.layout
    parts: dict[str, list[dict[str, Any]]] = {"trigger": [], "value": []}
    for part, name, offset, size_bytes in layout.pieces(manifest.quantization, model.width):
        if size_bytes:
            parts[part].append({"name": name, "offset": offset, "bytes": size_bytes})
    return {
        "path": str(package.path),
        "id": manifest.id,
        "name": manifest.name,
        "source": {
            "kind": manifest.source.kind,
            "name": manifest.source.name,
            "architecture": manifest.source.architecture,
            "weights": dict(manifest.source.weights),
            "importance": manifest.source.importance or None,
        },
        "quantization_reason": why(weights, manifest.quantization) if (weights := manifest.source.weights) else None,
        "quantization": manifest.quantization,
        "quantizations": manifest.all_quantizations,
        "precision": manifest.precision,
        "parameters": parameters(manifest),
        "model": asdict(model) | {"layers": model.layers},
        "state_bytes": STATE_ELEMENT_BYTES * model.all_state_elements,
        "end_tokens": list(manifest.end_tokens),
        "chat_template": manifest.chat is not None,
        "bytes": bytes_by_kind(manifest),
        "layout": {
            "cluster_neurons": layout.cluster_neurons,
            "clusters": layout.clusters,
            "block_neurons": layout.block_neurons,
            "blocks": layout.blocks,
            "neuron_order": layout.neuron_order,
            "trigger_part": {"bytes": layout.trigger_part_bytes, "pieces": parts["trigger"]},
            "value_part": {"bytes": layout.value_part_bytes, "pieces": parts["value"]},
        },
        "source_experts": None if manifest.source_experts is None else asdict(manifest.source_experts),
        "reading": read_units(manifest, curve) if curve is not None else None,
        "quantization_error": dict(manifest.quantization_error),
        "activity_by_layer": None if manifest.fired_by_layer is None else list(manifest.fired_by_layer),
        "trigger_fired_by_layer": list(fired) if (fired := manifest.trigger_fired_by_layer) is not None else None,
        "predictor": None if (predictor := manifest.predictor) is None else asdict(predictor),
        "predictor_ranks": None if predictor is None else ranks(predictor),
        "profiles": [asdict(profile) | {"reuse": profile.reuse} for profile in manifest.profiles],
        "silent": None if manifest.silent is None else asdict(manifest.silent) | {"loss": manifest.silent.loss()},
        "npu": None if manifest.npu is None else asdict(manifest.npu) | {"loss_share": manifest.npu.loss_share},
        "workload": None if manifest.workload is None else asdict(manifest.workload),
        "warnings": warnings(manifest),
    }


def warnings(manifest: Manifest) -> list[str]:
    """Return notes for the user on the package's speed and quality; empty if there is nothing to note."""
    predictor = manifest.predictor
    recall = None if predictor is None else low_recall(predictor, DEFAULT_RECALL)
    return list(filter(None, (dense_reading(manifest.model), unmeasured_predictor(manifest), recall)))


def dense_reading(model: ModelSpec) -> str | None:
    """Return a warning that a token reads all weights of its experts, since all neurons fire; None if not all fire."""
    if not model.all_neurons_fire:
        return None
    share = model.active_ffns / model.ffns
    reads = ALWAYS_FIRES if share == 1 else CHOSEN_FIRE.format(share=share)
    return f"{model.activation}: {reads}{LEAVES_OUT if model.activation == 'silu' else ''}"


def streams_densely(model: ModelSpec, plan: Plan) -> str | None:
    """Return a note on the share of the weights that do not fit memory and are read repeatedly, since all neurons fire;
    None if all weights are resident, in thresholded mode, or if not all fire."""
    memory = plan.memory
    absent = 1 - (memory.slots_bytes + memory.accelerator_bytes) / memory.ffn_bytes
    if not model.all_neurons_fire or plan.compute.mode == "thresholded" or absent <= 0:
        return None
    whose = "" if model.experts == 1 else " of a chosen expert"
    return (
        f"with {model.activation} every neuron{whose} fires, and {absent:.0%} of the feed-forward weights do not fit "
        "memory: they are read again and again; `neuronpipe inspect` says more"
    )


def low_recall(predictor: Predictor, target_recall: float) -> str | None:
    """Return a warning if a predictor's recall on held-out text is clearly below the target in some layer; else
    None."""
    recalls = [layer.recall for layer in predictor.by_layer]
    low = [recall for recall in recalls if recall < target_recall - MAX_RECALL_SHORTFALL]
    if not low:
        return None
    lowest, highest = f"{min(low):.1%}", f"{max(low):.1%}"
    lowest_to_highest = lowest if lowest == highest else f"{lowest} to {highest}"
    return (
        f"recall on held-out text is {lowest_to_highest} in {len(low)} of {len(recalls)} layers, below "
        f"{target_recall:.1%}: predicted mode leaves out more than that says; `neuronpipe profile` with more text of "
        "the kind that is generated (--text, --tokens), a higher --rank or --recall comes closer"
    )


def parameters(manifest: Manifest) -> int:
    """Return the number of the model's weights, biases included; a tied embedding counts once."""
    model = manifest.model
    fixed = sum(rows * columns for _, rows, columns in fixed_matrices(model))
    vectors = sum(length for name, length in fixed_vectors(model) if name != "rope.inverse_frequency")
    return fixed + vectors + model.ffns * len(model.ffn_matrices) * model.neurons * model.width


def bytes_by_kind(manifest: Manifest) -> dict[str, int]:
    """Return the bytes of a package on flash by kind. `padding` fills the pages of clusters, `total` is the sum of
    all kinds."""
    model, layout = manifest.model, manifest.layout
    kinds = dict.fromkeys(("embedding", "output", "attention", "vectors"), 0)
    for name, (dtype, dimensions) in fixed_tensors(manifest).items():
        kind = "vectors" if len(dimensions) == 1 else name.split(".")[0]
        kinds[kind if kind in kinds else "attention"] += DTYPE_BYTES[dtype] * math.prod(dimensions)
    kinds["predictor"] = manifest.files[PREDICTOR].bytes if manifest.predictor else 0
    cluster_bytes = sum(piece[-1] for piece in layout.pieces(manifest.quantization, model.width))
    neurons_bytes = cluster_bytes * model.neurons * model.ffns // layout.cluster_neurons
    shared = manifest.files.get(SHARED)
    own_bytes = 0 if shared is None else shared.bytes
    kinds["neurons"] = own_bytes if manifest.source_experts is not None else neurons_bytes
    kinds["padding"] = 0 if manifest.source_experts is not None else manifest.files["bundles.bin"].bytes - neurons_bytes
    total = sum(entry.bytes for entry in manifest.files.values())
    return {**kinds, "other": total - sum(kinds.values()), "total": total}


def _heads(model: dict[str, Any]) -> str:
    heads = f"{model['query_heads']} query heads"
    if model["latent_width"]:
        return f"{heads} of {model['head_width']} on latents of {model['latent_width']} + {model['rotary_width']}"
    pairs = [
        (kind.get("key_heads") or model["key_heads"], kind.get("head_width") or model["head_width"])
        for kind in model["layer_kinds"]
    ]
    others = dict.fromkeys(pair for pair in pairs if pair != (model["key_heads"], model["head_width"]))
    elsewhere = "".join(f", in other layers {count} of {width}" for count, width in others)
    return f"{heads} on {model['key_heads']} key heads of {model['head_width']}{elsewhere}"


def _mixers(description: dict[str, Any]) -> str:
    """Return how many layers have each mixer, and the size of their state; "" if all have attention."""
    names = {"deltanet": "DeltaNet", "kda": "Kimi delta attention", "mamba2": "Mamba-2"}
    names |= {name: name for name in ("convolution", "attention")}
    counts: Counter[str] = Counter()
    for kind in description["model"]["layer_kinds"]:
        counts[kind["mixer"]] += kind["layers"]
    counts["attention"] -= description["model"]["draft_layers"]
    if not description["state_bytes"]:
        return ""
    layers = ", ".join(f"{counts[mixer]} layers with {name}" for mixer, name in names.items() if counts[mixer])
    return f"{layers}; state {description['state_bytes'] / MIB:,.1f} MiB a sequence; "


def render(description: dict[str, Any]) -> str:
    model, layout, sizes = description["model"], description["layout"], description["bytes"]
    source = description["source"]
    windows = sorted({kind["window_tokens"] for kind in model["layer_kinds"]} - {0})
    feed_forward = "expert" if model["experts"] > 1 else "layer"
    window = f", attention window {' and '.join(f'{tokens:,}' for tokens in windows)}" if windows else ""
    experts = f"{model['experts']} experts, {model['experts_per_token']} a token, of " if model["experts"] > 1 else ""
    layers = f"{model['layers'] - model['draft_layers']} layers{' and a draft layer' if model['draft_layers'] else ''}"
    lines = [
        f"{description['name']}   {description['parameters'] / 1e6:,.1f} M parameters, {description['precision']}, "
        f"{model['activation']}   {sizes['total'] / MIB:,.1f} MiB",
        f"  id      {description['id']}",
        f"  source  {source['kind']}: {source['name']} ({source['architecture']})",
        *([f"  stored  {_stored(description)}"] if _stored(description) else []),
        f"  shape   {layers} of width {model['width']:,} with {experts}{model['neurons']:,} neurons; "
        f"{_heads(model)}; {_mixers(description)}"
        f"vocabulary {model['vocabulary']:,}; context {model['context_tokens']:,}{window}",
        f"  chat    {'by its own template' if description['chat_template'] else NO_TEMPLATE}",
        "",
        "Bytes",
        *(f"  {kind:<10} {size:>15,}  {size / sizes['total']:>6.1%}" for kind, size in sizes.items()),
        "",
        *(_in_place_lines(description) if description["source_experts"] else _cluster_lines(layout, feed_forward)),
        *_reading_lines(description["reading"]),
    ]
    if errors := description["quantization_error"]:  # a synthetic package is made of what it stores
        lines += ["", "Quantization error, |w - w'| / |w|"]
        lines += [f"  {kind:<10} {error:>8.3%}" for kind, error in errors.items()]
    if (activity := description["activity_by_layer"]) is not None and min(activity) < 1:
        lines += ["", "Active neurons by layer (measured)"]
        lines += [f"  {n:>3}  {share:>6.1%}  {'#' * round(share * BAR_WIDTH)}" for n, share in enumerate(activity)]
    if description["profiles"]:
        lines += ["", *profile_lines(description["profiles"])]
    if (predictor := description["predictor"]) is not None:
        lines += ["", *_predictor_lines(predictor, description["predictor_ranks"])]
    if (silent := description["silent"]) is not None:
        lines += ["", *silent_lines(silent)]
    if (npu := description["npu"]) is not None:
        lines += ["", npu_line(npu)]
    if (workload := description["workload"]) is not None:
        lines += ["", f"Workload presets (seed {workload['seed']})"]
        lines += [f"  {name:<12} tokens {a:>7,} to {a + n - 1:,}" for name, (a, n) in workload["presets"].items()]
    for warning in description["warnings"]:
        lines += ["", f"note: {warning}"]
    return "\n".join(lines)


def _stored(description: dict[str, Any]) -> str:
    return "; ".join(
        filter(None, [_described_quantizations(description["quantizations"]), description["quantization_reason"]])
    )


def _described_quantizations(quantizations: Mapping[str, str]) -> str:
    layers: dict[tuple[str, str], int] = {}
    for name, quantization in quantizations.items():
        matrix = name.rpartition(".")[2]
        layers[matrix, quantization] = layers.get((matrix, quantization), 0) + name.startswith("layers.")
    return ", ".join(
        f"{matrix} in {quantization}" + (f" in {count} layers" if count else "")
        for (matrix, quantization), count in layers.items()
    )


UNITS = {"feed-forward": "whole feed-forwards", "cluster": "whole clusters", "part": "gates, then values"}


def _reading_lines(rows: list[dict[str, Any]] | None) -> list[str]:
    """Return lines on the bytes to read together, and whether planes (all gates of a feed-forward, then all values)
    would be faster; empty without a flash curve."""
    if rows is None:
        return []
    lines = ["", "What is read together, by this flash's speeds: microseconds for a cluster of a chosen feed-forward"]
    lines += [f"  {'mode':<10} {'resident':>8}  {'unit':<20} {'interleaved':>11} {'as planes':>10}"]
    for row in rows:
        share = "any" if row["resident_share"] is None else f"{row['resident_share']:.0%}"
        lines.append(
            f"  {row['mode']:<10} {share:>8}  {UNITS[row['unit']]:<20} {row['interleaved_us']:>11.1f} "
            f"{row['planes_us']:>10.1f}"
        )
    better = [f"{row['resident_share']:.0%}" for row in rows if row["planes_us"] < 0.95 * row["interleaved_us"]]
    conclusion = (
        f"planes would be faster only in exact mode at {', '.join(better)} resident"
        if better
        else "no planes are faster"
    )
    return [*lines, f"  the package's arrangement is interleaved clusters: {conclusion} (plans/cost/DECISIONS.md)"]


def _predictor_lines(predictor: dict[str, Any], ranks: str) -> list[str]:
    sides = " and ".join(predictor["sides"])
    head = f"Predictor of {sides}, {ranks}, {predictor['quantization']}, reads {predictor['reads']}"
    if not predictor["by_layer"]:
        return [f"{head}: from the checkpoint, never measured"]
    lines = [f"{head} ({predictor['calibration_tokens']:,} calibration tokens; held-out figures)"]
    lines += [f"  {'layer':>5} {'recall':>8} {'precision':>10} {'predicted':>10} {'per active':>11}"]
    for number, layer in enumerate(predictor["by_layer"]):
        ratio = layer["recall"] / layer["precision"] if layer["precision"] else 0.0
        shares = f"{layer['recall']:>8.1%} {layer['precision']:>10.1%} {layer['predicted']:>10.1%}"
        lines.append(f"  {number:>5} {shares} {ratio:>11.2f}")
    if (exact := predictor["exact_perplexity"]) is not None:
        predicted = predictor["predicted_perplexity"]
        lines.append(
            f"  perplexity {predicted:.4g} instead of {exact:.4g} exact ({predicted / exact - 1:+.2%}), on "
            f"{predictor['held_out_tokens']:,} held-out tokens of {predictor['text']}"
        )
    return lines


SHOWN_SHARES = (0.3, 0.5, 0.75, 0.9)
RESIDENCY_UNITS = {"value": "clusters' value parts", "bundle": "clusters", "expert": "whole experts"}


def profile_lines(profiles: list[dict[str, Any]]) -> list[str]:
    lines = []
    for profile in profiles:
        counted = "counts of PowerInfer" if profile["source"] == "powerinfer" else f"mode {profile['mode']}"
        wanted_shares, reuse = profile["wanted_by_layer"], profile["reuse"]
        again = "" if reuse is None else f"; {reuse:.0%} of that also for the token before"
        lines.append(f"Wanted neurons, {counted}, {profile['tokens']:,} tokens of {profile['text']}")
        lines.append(
            f"  a token wants {sum(wanted_shares) / len(wanted_shares):.1%} of the neurons that could compute it{again}"
        )
        hottest = ", ".join(f"{share:.0%}: {interpolated(profile['curve'], share):.0%}" for share in (0.05, 0.2, 0.5))
        lines.append(f"  what the hottest neurons make of it     {hottest}")
        guessed = [profile[f"experts_by_{name}"][1:] for name in ("frequency", "layer_before")]
        if all(guessed):
            often, before = (sum(of_layers) / len(of_layers) for of_layers in guessed)
            lines.append(
                f"  a token's experts that as many guesses find     by frequency: {often:.0%}, "
                f"by the layer before: {before:.0%}"
            )
        for unit, policies in (profile["misses"] or {}).items():
            shares = ", ".join(f"{share:.0%}: {interpolated(policies['clock'], share):.1%}" for share in SHOWN_SHARES)
            lines.append(f"  misses by resident share, {RESIDENCY_UNITS[unit]}     {shares}")
    return lines


def silent_lines(silent: dict[str, Any]) -> list[str]:
    """Return lines on the thresholds of thresholded mode and their loss, given the JSON values of `silent`."""
    lines = [
        f"Silent neurons in mode thresholded: {silent['share']:.1%} asked, by {silent['calibration_tokens']:,} "
        f"calibration tokens; {silent['loss']}",
        f"  {'layer':>5} {'silent':>8} {'where |silu(gate)| is below':>28}",
    ]
    for number, layer in enumerate(silent["by_layer"]):
        lines.append(f"  {number:>5} {layer['share']:>8.1%} {layer['threshold']:>28.6f}")
    return lines


def npu_line(npu: dict[str, Any]) -> str:
    """Return a line on the quality that prompts lose on a neural processor, given the JSON values of `npu`."""
    chosen = next(loss for loss in npu["losses"] if loss["scaling"] == npu["scaling"])
    ranges = "a scale of each token's own" if npu["scaling"] == "token" else "ranges of calibration text"
    return (
        f"Prompts on a neural processor, with {ranges}: perplexity {npu['loss_share']:+.3%}, the likeliest token "
        f"{chosen['agreement']:.2%} the same, on {npu['held_out_tokens']:,} held-out tokens of {npu['text']}"
    )


def _cluster_lines(layout: dict[str, Any], feed_forward: str) -> list[str]:
    return [
        f"Clusters of {layout['cluster_neurons']} neurons ({layout['neuron_order']} order), {layout['clusters']:,} per "
        f"{feed_forward}; blocks of {layout['block_neurons']}, {layout['blocks']} per {feed_forward}",
        *_drawn("trigger", layout["trigger_part"]),
        *_drawn("value", layout["value_part"]),
    ]


def _in_place_lines(description: dict[str, Any]) -> list[str]:
    """Return lines on experts that are read in place: the files, and each matrix's encodings."""
    experts, quantizations = description["source_experts"], description["quantizations"]
    lines = ["Experts are read in place, each as one cluster, from"]
    lines += [f"  {escaped(file['path'])}  {file['bytes'] / MIB:,.1f} MiB" for file in experts["files"]]
    for name, layers in experts["matrices"].items():
        encodings = Counter(rows["encoding"] for rows in layers)
        stored = ", ".join(f"{encoding} {count} times" for encoding, count in encodings.most_common())
        lines.append(
            f"  {name:<5} {quantizations.get(name, description['quantization'])} in memory; stored as {stored}"
        )
    return lines


def _drawn(name: Part, part: dict[str, Any]) -> list[str]:
    """Return a part of a cluster as a bar, with a legend. Each piece has a letter; dots are padding."""
    bar, legend = ["."] * BAR_WIDTH, []
    for letter, piece in zip("abcdef", part["pieces"], strict=False):
        start = piece["offset"] * BAR_WIDTH // part["bytes"]
        stop = -(-(piece["offset"] + piece["bytes"]) * BAR_WIDTH // part["bytes"])
        bar[start:stop] = letter * (stop - start)
        legend.append(f"{letter} {piece['name']} {piece['bytes']:,}")
    padding = part["bytes"] - sum(piece["bytes"] for piece in part["pieces"])
    return [
        f"  {name} part [{''.join(bar)}] {part['bytes']:,}",
        f"            {', '.join(legend)}, padding {padding:,}",
    ]
