"""Drafted tokens: what a text probably continues with, and how many drafted tokens a step should compute.

Answers often repeat a passage of their text: code is written again with small changes, a question is quoted. A draft is
what followed the last NGRAM_TOKENS tokens where they occurred before. Where there is none, the draft layer of a model
that has one predicts tokens, in the step that computes them. A decode step computes the newest token and the draft at
once. A drafted token counts if it is the token that was sampled before it, so the text is the same as without drafts. A
step of several tokens takes longer, and drafts pay only in some texts and runs: `StepTimes` measures.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

NGRAM_TOKENS = 3
LOOKUP_TOKENS = 1 << 14
"""How far back a draft is searched, which takes up to 0.07 ms in random texts (Zen 4)."""
MAX_ODD_PLACES = 16
"""After so many places inside of a token a search ends, so that no text can make it slow."""
ACCEPTANCE_RATE, TIME_RATE = 0.2, 0.2
"""The weights of the newest value in averages."""
ASSUMED_MS_SHARE, ASSUMED_LAYER_MS_SHARE = 0.25, 0.15
"""What each further token, and its prediction by the draft layer, is assumed to add to a step's time before that is
measured."""
ASSUMED_ACCEPTANCE, ASSUMED_TRIALS, COUNTED_TRIALS = 0.8, 4, 32
"""The acceptance of tokens from the draft layer before any is measured, and as how many tokens that counts. The last
COUNTED_TRIALS tokens or so are counted."""
MIN_GAIN = 1.05
"""Drafts must promise this many times the speed of single tokens."""
RETRY_STEPS = 128
"""After so many steps of single tokens, slow steps of several tokens are tried again."""
_TOKEN_BYTES = 4


class Drafter:
    """The drafts of one text.

    acceptance: how often the next token was the one that the text's earlier occurrence suggests, 0 to 1, averaged over
    the last few tokens
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._text = bytearray(array("i", tokens).tobytes())
        self._match = -1  # the byte after the earlier occurrence of the newest tokens; -1: there is none
        self.acceptance = 0.0

    def append(self, token: int) -> None:
        """Add a token to the text, and note whether a draft would have had it."""
        is_foreseen = self.draft(1) == (token,)
        self.acceptance += ACCEPTANCE_RATE * (is_foreseen - self.acceptance)
        self._text += array("i", [token]).tobytes()
        self._match = self._match + _TOKEN_BYTES if is_foreseen else self._search()

    def draft(self, max_tokens: int) -> tuple[int, ...]:
        """Return up to this many tokens that probably come next; none if the newest tokens are new to the text."""
        if self._match < 0:
            return ()
        return tuple(array("i", bytes(self._text[self._match : self._match + _TOKEN_BYTES * max_tokens])))

    def _search(self) -> int:
        ngram_bytes = NGRAM_TOKENS * _TOKEN_BYTES
        if len(self._text) <= ngram_bytes:
            return -1
        newest = self._text[-ngram_bytes:]
        first, end = max(0, len(self._text) - LOOKUP_TOKENS * _TOKEN_BYTES), len(self._text) - 1
        for _ in range(1 + MAX_ODD_PLACES):
            at = self._text.rfind(newest, first, end)
            if at < 0 or at % _TOKEN_BYTES == 0:
                return at + ngram_bytes if at >= 0 else -1
            end = at + ngram_bytes - 1
        return -1


class LayerAcceptance:
    """The share of the draft layer's tokens that are accepted, 0 to 1, over the last tokens of all texts."""

    def __init__(self) -> None:
        self.assume()

    def assume(self) -> None:
        """Take the assumed share in place of the measured one."""
        self._trials, self._measured = float(ASSUMED_TRIALS), 0
        self._accepted = ASSUMED_ACCEPTANCE * ASSUMED_TRIALS

    @property
    def is_assumed(self) -> bool:
        """True if so little was measured that the share is mostly assumed: a step drafts one token then."""
        return self._measured < ASSUMED_TRIALS

    @property
    def share(self) -> float:
        return self._accepted / self._trials

    def measured(self, accepted: int, judged: int) -> None:
        """Note how many of a step's tokens from the layer were compared with the text, and how many were accepted."""
        for number in range(judged):
            decay = 1 - 1 / COUNTED_TRIALS
            self._measured += 1
            self._trials = decay * self._trials + 1
            self._accepted = decay * self._accepted + (number < accepted)


class StepTimes:
    """Measured times of a run's decode steps for one sequence, by number of drafted tokens, and by where they are from:
    the text or the draft layer.

    acceptance: the acceptance of the draft layer's tokens
    """

    def __init__(self) -> None:
        self._ms: dict[tuple[int, bool], float] = {}
        self._singles = 0  # steps of one token since times were last forgotten
        self._has_begun = False
        self.acceptance = LayerAcceptance()

    def measured(self, drafted: int, ms: float, *, by_layer: bool = False) -> None:
        """Note a step's time, in milliseconds, from the previous step's tokens to its own. The first step of a run does
        not count: it reads what later ones find in memory."""
        if not self._has_begun:
            self._has_begun = True
            return
        kind = drafted, by_layer
        old_ms = self._ms.get(kind, ms)
        self._ms[kind] = old_ms + TIME_RATE * (min(ms, 2 * old_ms) - old_ms)  # a single delay counts little
        self._singles += drafted == 0
        if self._singles == RETRY_STEPS:
            self._singles, self._ms = 0, {(0, False): self._ms[0, False]}
            self.acceptance.assume()

    def best_draft_tokens(self, acceptance: float, max_tokens: int, *, by_layer: bool = False) -> int:
        """Return the number of drafted tokens with which a step yields most tokens per second; 0: drafts do not pay.

        acceptance: the probability that a drafted token is accepted after those before it
        """
        if (single_ms := self._ms.get((0, False))) is None or single_ms <= 0:
            return 0
        assumed_share = ASSUMED_MS_SHARE + ASSUMED_LAYER_MS_SHARE * by_layer
        best, best_tokens_per_ms, expected_tokens = 0, MIN_GAIN / single_ms, 1.0
        for drafted in range(1, max_tokens + 1):
            expected_tokens += acceptance**drafted
            ms = self._ms.get((drafted, by_layer), single_ms * (1 + assumed_share * drafted))
            if expected_tokens / ms > best_tokens_per_ms:
                best, best_tokens_per_ms = drafted, expected_tokens / ms
        return best
