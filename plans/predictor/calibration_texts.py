"""Texts for fitting and evaluating predictors and thresholds: context windows of token ids, some held out."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.package.reader import Package
from neuronpipe.plans.package.tokenizer import open_tokenizer
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

MAX_WINDOW_TOKENS = 512
HELD_OUT_PART = 4  # calibration windows for each held-out window
MIN_TOKENS = 512

ContextWindow = Sequence[int]


@frozen
class Texts:
    """Context windows of token ids. The first token of each has position 0."""

    calibration: Sequence[ContextWindow]
    held_out: Sequence[ContextWindow]

    @property
    def calibration_tokens(self) -> int:
        return sum(map(len, self.calibration))


def read_text(path: Path) -> str:
    """Return the content of a UTF-8 file. Raises UserError if it cannot be read or decoded."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}: is no UTF-8 text: {error.reason} at byte {error.start}; `iconv -t UTF-8` makes it one"
        ) from None


def from_file(package: Package, path: Path, tokens: int) -> Texts:
    """Return context windows from the start of a UTF-8 file, `tokens` for calibration, and a held-out part after them.
    Raises UserError if the file has fewer than MIN_TOKENS or is no text."""
    text = read_text(path)
    if "\0" in text:
        raise UserError(f"{path}: has zero bytes, so it is not a text")
    ids = (
        open_tokenizer(package.tokenizer(), str(package.tokenizer_path))
        .encode(text)
        .ids[: max(MIN_TOKENS, tokens + tokens // HELD_OUT_PART)]
    )
    if len(ids) < MIN_TOKENS:
        raise UserError(f"{path}: {len(ids)} tokens; profiling needs {MIN_TOKENS} or more")
    # Windows have nearly the same length, so that the held-out part of a short text is not only a few tokens.
    count = max(HELD_OUT_PART + 1, -(-len(ids) // _window_tokens(package.manifest)))
    starts = [number * len(ids) // count for number in range(count + 1)]
    windows = [ids[start:stop] for start, stop in itertools.pairwise(starts)]
    cut = count - count // (HELD_OUT_PART + 1)
    return Texts(windows[:cut], windows[cut:])


def from_demo(package: Package, tokens: int) -> Texts:
    """Return context windows of the demo model's corpus, each from the middle of another document. Those for
    calibration, about `tokens`, are from the training set."""
    from neuronpipe.plans.demo.corpus import documents

    tokenizer = open_tokenizer(package.tokenizer(), str(package.tokenizer_path))
    length = _window_tokens(package.manifest)

    def windows(target_tokens: int, *, held_out: bool) -> Sequence[ContextWindow]:
        texts = list(documents(held_out=held_out))
        count = max(1, target_tokens // length)
        chosen = [tokenizer.encode(text).ids for text in texts[:: max(1, len(texts) // count)]]
        middles = [ids[(len(ids) - length) // 2 :][:length] if len(ids) > length else ids for ids in chosen]
        return [ids for ids in middles if len(ids) > 1][:count]

    return Texts(windows(tokens, held_out=False), windows(tokens // HELD_OUT_PART, held_out=True))


def from_workload(manifest: Manifest, tokens: int) -> Texts:
    """Return context windows of a synthetic package's presets: the first part of each, at most `tokens` in all, and the
    next part, held out. Raises UserError if there is no workload."""
    if manifest.workload is None:
        raise UserError("this package has no workload; name a calibration text with --text FILE")
    calibration, held_out = [], []
    for first, count in manifest.workload.presets.values():
        share = min(tokens // len(manifest.workload.presets), 2 * count // 3)
        calibration.append(range(first, first + share))
        held_out.append(range(first + share, first + share + max(2, share // HELD_OUT_PART)))
    return Texts(calibration, held_out)


def activity_windows(package: Package, texts: Texts | None, tokens: int) -> list[ContextWindow]:
    """Return context windows for an activity profile, of at most `tokens` tokens. Raises UserError if there are neither
    texts nor a workload.

    texts: None: a synthetic package's default preset, from its end, because benchmarks use its start
    """
    if texts is not None:
        windows = [*texts.calibration, *texts.held_out]
    elif (workload := package.manifest.workload) is None:
        raise UserError("this package has no workload; name a text with --text FILE")
    else:
        first, count = workload.presets.get("default") or next(iter(workload.presets.values()))
        windows = [range(first + max(0, count - tokens), first + count)]
    length, pieces = _window_tokens(package.manifest), []
    for window in windows:
        for start in range(0, min(len(window), tokens), length):
            pieces.append(window[start : min(start + length, tokens)])
        tokens -= min(len(window), tokens)
    return [window for window in pieces if len(window) > 1]


def _window_tokens(manifest: Manifest) -> int:
    return min(MAX_WINDOW_TOKENS, manifest.model.context_tokens)
