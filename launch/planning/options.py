"""`PlanOptions`, the checked values of the plan options of a command line."""

from __future__ import annotations

from pathlib import Path

from neuronpipe.launch.planning import AUTO
from neuronpipe.plans.plan.document import KvType, Mode
from neuronpipe.plans.planner.mode_choice import Quality, show_quality
from neuronpipe.plans.planner.plan_options import Baseline, Technique
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen


@frozen(kw_only=True)
class PlanOptions:
    """The values of the plan options; None leaves the choice to the planner.

    memory_bytes: the limit of the whole run; AUTO follows the memory that is available
    prompt_cache_bytes: maximum of all files of the prompt cache on disk; 0: no prompt cache
    backends: pairs of role and backend, in the order typed; a later one of the same role wins
    history: what earlier runs of the package counted and measured is used, and that of this run is kept
    plan_file: an existing plan to use; then no other option may be typed
    typed: the options that were typed for this command, in the order of the help. Options from the settings file are
        not among them, except --plan: they give way to a live run and to --plan
    """

    memory_bytes: int | None = None
    target_tokens_per_s: float | None = None
    quality: Quality | None = None
    ffn_resident_share: float | None = None
    context_tokens: int | None = None
    sequences: int | None = None
    workers: int | None = None
    cores: tuple[int, ...] | None = None
    mode: Mode | None = None
    backends: tuple[tuple[str, str], ...] = ()
    accelerator_memory_bytes: int | None = None
    without: frozenset[Technique] = frozenset()
    hints: bool = False
    kv_type: KvType = "f16"
    baseline: Baseline | None = None
    prompt_cache_bytes: int = 0
    history: bool = False
    plan_file: Path | None = None
    typed: tuple[str, ...] = ()

    @property
    def follows_available_memory(self) -> bool:
        return self.memory_bytes == AUTO

    @property
    def has_fixed_limit(self) -> bool:
        return self.memory_bytes not in (None, AUTO)

    @property
    def uses_history(self) -> bool:
        """True if the plan is made with what earlier runs have counted and measured."""
        return self.history and self.plan_file is None

    @property
    def keeps_history(self) -> bool:
        """True if what the run counts and measures is kept; an experiment would mislead later plans."""
        return self.history and not self.without and not self.hints and self.baseline is None

    def backend(self, role: str) -> str | None:
        """Return the backend of a role; None if the options name none."""
        return dict(self.backends).get(role)

    def check_consistent(self) -> None:
        """Raise UserError if two options contradict each other."""
        if self.plan_file is not None and len(self.typed) > 1:
            raise UserError(
                f"{self.typed[0]} and --plan {self.plan_file}: the plan decides that; leave one of the two out"
            )
        if self.baseline is not None:
            self._check_baseline()
        if self.quality is None:
            return
        if self.kv_type != "f16":
            raise UserError(
                f"--kv-type {self.kv_type} and --quality {show_quality(self.quality)}: {self.kv_type} changes results "
                "by more than the quality says; leave one of the two out"
            )
        allows_loss = self.quality != "exact"
        deciding = {
            f"--mode {self.mode}": self.mode is not None,
            f"--baseline {self.baseline}": self.baseline is not None,
            "--hints": self.hints and allows_loss,
            "--without predictor": "predictor" in self.without and allows_loss,
        }
        for option, is_typed in deciding.items():
            if is_typed:
                raise UserError(
                    f"{option} and --quality {show_quality(self.quality)}: the former decides the mode; "
                    "leave one of the two out"
                )

    def _check_baseline(self) -> None:
        conflicts = (
            (
                f"--target-speed {self.target_tokens_per_s}",
                self.target_tokens_per_s is not None,
                "a baseline is planned for a memory limit",
            ),
            (f"--mode {self.mode}", self.mode not in (None, "predicted"), "a baseline computes in mode predicted"),
            ("--hints", self.hints, "a baseline does not prefetch"),
        )
        for option, is_typed, reason in conflicts:
            if is_typed:
                raise UserError(f"--baseline {self.baseline} and {option}: {reason}; leave one of the two out")
