"""Profiling of a package: fits the predictors on calibration text, and evaluates them on held-out text, a layer at a
time in one pass of the reference engine. A second pass with predictions measures the perplexity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from neuronpipe.plans.activity.stored_profile import remove_profile
from neuronpipe.plans.convert.quantize import encode
from neuronpipe.plans.models.spec import ModelSpec
from neuronpipe.plans.package.layout import GROUP_WEIGHTS, Quantization
from neuronpipe.plans.package.manifest import (
    DEFAULT_RECALL,
    MAX_PERPLEXITY,
    Hidden,
    Predictor,
    PredictorInput,
    PredictorQuality,
    Side,
)
from neuronpipe.plans.package.predictor_writer import (
    FiringShares,
    LayerFactors,
    SideFactor,
    write_predictor,
)
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.predictor.calibration_texts import ContextWindow, Texts
from neuronpipe.plans.predictor.fit import NEVER, Calibration, fit_layer, thresholds
from neuronpipe.plans.predictor.imported_predictor import ImportedPredictor
from neuronpipe.plans.predictor.predictions import StoredPredictor, judge, predicted_neurons
from neuronpipe.plans.reference.engine import LayerRun, ReferenceEngine
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen
from numpy.typing import NDArray

MIN_CALIBRATION_TOKENS = 16  # of an expert; with fewer, nothing is fitted
ATTENTION_SHARE = 0.25  # of a layer's time with fitting; both shares were measured with the demo
COMPUTED_SHARE = 0.3  # of an expert's time, before its predictor is fitted
BOTH_SIDES: tuple[Side, ...] = ("gate", "up")

Progress = Callable[[int, int], None]


@dataclass
class Candidate:
    """A choice of sides and rank, with the resulting factors and their quality.

    ranks: rank of each feed-forward; None: all have `rank`
    factors: the factors of each feed-forward, by its number
    judged: layer -> (number of held-out tokens, quality) of each expert
    """

    sides: tuple[Side, ...]
    rank: int
    hidden: Hidden = "none"
    ranks: tuple[int, ...] | None = None
    factors: dict[int, LayerFactors] = field(default_factory=dict)
    judged: dict[int, list[tuple[int, PredictorQuality]]] = field(default_factory=dict)

    @property
    def quality(self) -> list[PredictorQuality]:
        """The quality of each layer: the mean over its experts, weighted by their tokens."""
        return [_mean_quality(self.judged[layer]) for layer in sorted(self.judged)]

    @property
    def predicted(self) -> float:
        """The predicted share of neurons, mean over layers."""
        return float(np.mean([layer.predicted for layer in self.quality]))


@frozen
class TrainedPredictor:
    """Factors that were trained before, for which only thresholds are fitted.

    of_ffn: returns the factors of a feed-forward
    """

    sides: tuple[Side, ...]
    ranks: tuple[int, ...]
    quantization: Quantization
    reads: PredictorInput
    hidden: Hidden
    of_ffn: Callable[[int], LayerFactors]

    @classmethod
    def of_package(cls, package: Package) -> TrainedPredictor:
        """Return the package's predictor. Raises UserError if it has none."""
        if (predictor := package.manifest.predictor) is None:
            raise UserError(f"{package.path}: has no predictor that could be calibrated; fit one, without --calibrate")
        ranks = tuple(predictor.rank_of(ffn) for ffn in range(package.manifest.model.ffns))
        return cls(
            predictor.sides,
            ranks,
            predictor.quantization,
            predictor.reads,
            predictor.hidden,
            StoredPredictor(package).of_ffn,
        )

    @classmethod
    def of_file(
        cls, imported: ImportedPredictor, model: ModelSpec, quantization: Quantization, *, reads_normed: bool
    ) -> TrainedPredictor:
        """Return an imported predictor.

        reads_normed: trained on normed vectors, not on the residual stream
        """

        def of_ffn(number: int) -> LayerFactors:
            first, second = imported.of_ffn(number)
            side = SideFactor(encode(quantization, second), np.zeros(model.neurons, np.float32))
            return LayerFactors(encode(quantization, first), {model.trigger: side})

        reads: PredictorInput = "feed_forward" if reads_normed else "residual"
        return cls((model.trigger,), imported.ranks, quantization, reads, "relu", of_ffn)

    def candidate(self) -> Candidate:
        return Candidate(self.sides, max(self.ranks), self.hidden, self.ranks if len(set(self.ranks)) > 1 else None)


@frozen
class ProfilingResult:
    """A package with its new predictor.

    candidates: all that were tried; the first is in the package
    exact_perplexity, predicted_perplexity: perplexities of held-out text, by the reference engine
    """

    package: Package
    candidates: list[Candidate]
    exact_perplexity: float
    predicted_perplexity: float


def profile(
    package: Package,
    texts: Texts,
    *,
    rank: int,
    quantization: Quantization = "q8",
    recall: float = DEFAULT_RECALL,
    reads: PredictorInput = "feed_forward",
    sides: str = "auto",
    imported: ImportedPredictor | None = None,
    imported_reads_normed: bool = False,
    calibrate: bool = False,
    text: str = "a text without a name",
    progress: Progress | None = None,
) -> ProfilingResult:
    """Fit, evaluate and write a predictor. The activity profile of predicted mode is removed.

    rank, quantization, recall, reads: properties of a fitted predictor; imported and calibrated predictors have
        their own rank and input
    sides: `trigger`, `both` or `auto`; with drelu, `auto` tries both sides, and the trigger alone with as many bytes,
        and uses the candidate that predicts fewer neurons
    imported, calibrate: fit only the thresholds of an imported predictor, or of the package's
    imported_reads_normed: `imported` was trained on normed vectors, not on the residual stream
    text: name of the texts

    Raises UserError if the package is damaged or has SiLU, or if options do not fit it.
    """
    model = package.manifest.model
    if model.all_neurons_fire:
        hint = "; `--silent 50%` leaves out those that count least" if model.activation == "silu" else ""
        raise UserError(
            f"{package.path}: activation: {model.activation} neurons always fire; there is nothing to predict{hint}"
        )
    if rank % GROUP_WEIGHTS or not 0 < rank <= model.width:
        raise UserError(f"rank {rank}: takes multiples of {GROUP_WEIGHTS} up to the width, {model.width}")
    if model.experts > 1 and reads == "attention":
        raise UserError(f"{package.path}: predictors of a mixture read the feed-forward's input; leave --reads out")
    trained = TrainedPredictor.of_package(package) if calibrate else None
    if imported is not None:
        trained = TrainedPredictor.of_file(imported, model, quantization, reads_normed=imported_reads_normed)
    if trained is not None and reads == "attention":
        raise UserError("--reads attention: a trained predictor reads what it was trained on; leave --reads out")
    if trained is not None:
        quantization, reads = trained.quantization, trained.reads
    candidates = _candidates(sides, rank, model) if trained is None else [trained.candidate()]
    package.verify_fixed()
    calibration_tokens = texts.calibration_tokens
    held_out = sum(map(len, texts.held_out))
    total_tokens = calibration_tokens + held_out

    reporter = _Progress(progress, model, total_tokens, held_out)
    reporter.layer(0, 0)
    fired, trigger_fired = _FiringByLayer(model.layers), _FiringByLayer(model.layers)

    def fallback_factors(candidate: Candidate, ffn: int) -> LayerFactors:
        """Return the factors of an expert with too few tokens: as trained, or factors that predict every neuron."""
        return _predict_everything(candidate, model, quantization) if trained is None else trained.of_ffn(ffn)

    def observe(run: LayerRun) -> None:
        reporter.fit(run.ffn, 0, len(candidates), 0.0)
        inputs = run.read_by(reads)
        active = run.inner != 0
        fired.add(run.layer, active)
        trigger_fired.add(run.layer, run.values[model.trigger] > model.activation_threshold)
        fitted_tokens = int(np.count_nonzero(run.tokens < calibration_tokens))
        for number, candidate in enumerate(candidates):
            calibration = _calibration(run, inputs, active, fitted_tokens, candidate.sides, model.activation_threshold)
            if fitted_tokens < MIN_CALIBRATION_TOKENS and model.experts > 1:
                factors = fallback_factors(candidate, run.ffn)
            elif trained is None:
                fitting = partial(reporter.fit, run.ffn, number, len(candidates))
                factors = fit_layer(calibration, candidate.rank, quantization, recall, fitting)
            else:
                factors = trained.of_ffn(run.ffn)
                rows = {side: factor.rows for side, factor in factors.sides.items()}
                factors = thresholds(factors.input, rows, calibration, quantization, recall, trained.hidden)
            candidate.factors[run.ffn] = factors
            if fitted_tokens < len(run.tokens):
                predicted = predicted_neurons(quantization, factors, candidate.hidden, inputs[fitted_tokens:])
                judged = candidate.judged.setdefault(run.layer, [])
                judged.append((len(predicted), judge(predicted, active[fitted_tokens:])))
            reporter.fit(run.ffn, number, len(candidates), 1.0)

    exact = ReferenceEngine(package, observe=observe, attended=reporter.attended)
    hidden, _ = exact.hidden([*texts.calibration, *texts.held_out])
    candidates.sort(key=lambda candidate: candidate.predicted)
    chosen = candidates[0]
    never_chosen = set(range(model.ffns)) - chosen.factors.keys()
    chosen.factors |= {ffn: fallback_factors(chosen, ffn) for ffn in never_chosen}
    predictor = Predictor(
        chosen.rank,
        quantization,
        reads,
        chosen.sides,
        chosen.hidden,
        calibration_tokens,
        tuple(chosen.quality),
        chosen.ranks,
    )

    def mask(run: LayerRun) -> NDArray[np.bool_]:
        reporter.held_out_pass(run.layer * held_out)
        return predicted_neurons(quantization, chosen.factors[run.ffn], chosen.hidden, run.read_by(reads))

    predicting = ReferenceEngine(package, mask=mask)
    predicted_hidden, _ = predicting.hidden(texts.held_out)
    exact_perplexity = perplexity(exact, hidden[calibration_tokens:], texts.held_out, reporter.logits_computed)
    predicted_perplexity = perplexity(exact, predicted_hidden, texts.held_out, reporter.logits_computed)
    return ProfilingResult(
        remove_profile(
            write_predictor(
                package,
                _with_loss(predictor, text, held_out, exact_perplexity, predicted_perplexity),
                [chosen.factors[ffn] for ffn in range(model.ffns)],
                FiringShares(fired.shares(), trigger_fired.shares()),
            ),
            "predicted",  # this profile was measured with another predictor
        ),
        candidates,
        exact_perplexity,
        predicted_perplexity,
    )


def _with_loss(predictor: Predictor, text: str, held_out_tokens: int, exact: float, predicted: float) -> Predictor:
    """Return the predictor with its perplexities; without them if they are too large, as in untrained models."""
    if not (exact <= MAX_PERPLEXITY and predicted <= MAX_PERPLEXITY):
        return predictor
    return replace(
        predictor,
        text=text,
        held_out_tokens=held_out_tokens,
        exact_perplexity=max(1.0, round(exact, 6)),
        predicted_perplexity=max(1.0, round(predicted, 6)),
    )


class _Progress:
    """Progress in tokens times layers.

    Both texts pass all layers for fitting and evaluation. The held-out text passes them once more, and its logits are
    computed twice.
    """

    def __init__(self, progress: Progress | None, model: ModelSpec, total_tokens: int, held_out: int) -> None:
        self._progress, self._model, self._total_tokens, self._held_out = progress, model, total_tokens, held_out
        self._logit_tokens = 0

    def layer(self, layer: int, share: float) -> None:
        self._report(int((layer + share) * self._total_tokens))

    def attended(self, layer: int, tokens: int) -> None:
        self.layer(layer, ATTENTION_SHARE * tokens / self._total_tokens)

    def fit(self, ffn: int, candidate: int, candidates: int, share: float) -> None:
        layer, expert = self._model.place_of(ffn)
        fitted = COMPUTED_SHARE + (1 - COMPUTED_SHARE) * (candidate + share) / candidates
        self.layer(
            layer, ATTENTION_SHARE + (1 - ATTENTION_SHARE) * (expert + fitted) / self._model.expert_counts[layer]
        )

    def held_out_pass(self, tokens: int) -> None:
        """Report the tokens times layers that are done in the second pass over the held-out text."""
        self._report(self._model.layers * self._total_tokens + tokens)

    def logits_computed(self, tokens: int) -> None:
        self._logit_tokens += tokens
        self.held_out_pass(self._model.layers * self._held_out + self._logit_tokens)

    def _report(self, tokens: int) -> None:
        if self._progress is not None:
            self._progress(tokens, self._model.layers * (self._total_tokens + self._held_out) + 2 * self._held_out)


class _FiringByLayer:
    def __init__(self, layers: int) -> None:
        self._counts = np.zeros((layers, 2))

    def add(self, layer: int, fired: NDArray[np.bool_]) -> None:
        """Add a mask [tokens, neurons] of an expert, for the tokens that chose it."""
        self._counts[layer] += (fired.sum(), fired.size)

    def shares(self) -> tuple[float, ...]:
        return tuple(round(float(fired / max(size, 1)), 6) for fired, size in self._counts)


def _mean_quality(judged: list[tuple[int, PredictorQuality]]) -> PredictorQuality:
    tokens = sum(count for count, _ in judged)
    names = ("recall", "precision", "predicted")
    return PredictorQuality(
        *(round(sum(count * getattr(quality, name) for count, quality in judged) / tokens, 6) for name in names)
    )


def _predict_everything(candidate: Candidate, model: ModelSpec, quantization: Quantization) -> LayerFactors:
    nothing = encode(quantization, np.zeros((model.neurons, candidate.rank), np.float32))
    always = np.full(model.neurons, -NEVER, np.float32)
    return LayerFactors(
        encode(quantization, np.zeros((candidate.rank, model.width), np.float32)),
        {side: SideFactor(nothing, always) for side in candidate.sides},
    )


def _candidates(sides: str, rank: int, model: ModelSpec) -> list[Candidate]:
    trigger, width, neurons = (model.trigger,), model.width, model.neurons
    if sides == "both" and model.activation != "drelu":
        raise UserError("--sides both: only with drelu does the sign of up decide anything")
    if sides == "both":
        return [Candidate(BOTH_SIDES, rank)]
    if sides == "trigger" or model.activation != "drelu":
        return [Candidate(trigger, rank)]
    same_bytes = rank * (width + 2 * neurons) // (width + neurons) // GROUP_WEIGHTS * GROUP_WEIGHTS
    return [Candidate(BOTH_SIDES, rank), Candidate(trigger, min(same_bytes, width))]


def _calibration(
    run: LayerRun,
    inputs: NDArray[np.float32],
    active: NDArray[np.bool_],
    cut: int,
    sides: tuple[Side, ...],
    threshold: float,
) -> Calibration:
    """Return the calibration data of a feed-forward's first `cut` tokens. `threshold` is subtracted from values, so
    that a neuron fires if its value is above 0."""
    feed_forward = run.feed_forward_input[:cut]
    return Calibration(
        reads=feed_forward if inputs is run.feed_forward_input else inputs[:cut],
        feed_forward=feed_forward,
        weights={side: run.weights[side] for side in sides},
        values={side: run.values[side][:cut] - np.float32(threshold) for side in sides},
        active=active[:cut],
    )


def perplexity(
    engine: ReferenceEngine,
    hidden: NDArray[np.float32],
    texts: Sequence[ContextWindow],
    progress: Callable[[int], None] = lambda tokens: None,
) -> float:
    """Return the perplexity of all tokens but the first of each context window.

    hidden: residual stream after the last layer, of all windows
    progress: receives the number of tokens of each window
    """
    total, logits_computed, start = 0.0, 0, 0
    for window in texts:
        logits = engine.logits(hidden[start : start + len(window) - 1]).astype(np.float64)
        start += len(window)
        top = logits.max(axis=1, keepdims=True)
        spread = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
        total += float((spread - logits[np.arange(len(logits)), np.asarray(window[1:])]).sum())
        logits_computed += len(logits)
        progress(len(window))
    return float(np.exp(total / max(1, logits_computed)))
