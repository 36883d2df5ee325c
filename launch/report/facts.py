"""The facts of a report: this machine, this program, a measurement. None of them identifies a person or a host."""

from __future__ import annotations

import datetime
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.report.document import (
    FORM,
    MAX_NAME_CHARACTERS,
    MAX_TEXT_CHARACTERS,
    Figures,
    FlashFigures,
    FlashRead,
    Report,
    ReportedDevice,
    ReportedModel,
    ReportedPlan,
    ReportedTest,
)
from neuronpipe.plans.device.device import Device, FlashCurve
from neuronpipe.plans.measure.probe import CacheState
from neuronpipe.plans.plan.document import Plan

CHECKOUT = DEMO.parents[2]
GIT_TIMEOUT_S = 5
REPORTED_READS = ((4 << 10, 1), (4 << 10, 32), (64 << 10, 32), (1 << 20, 32))
"""Sizes and depths of the reads whose speeds a report has."""


def report_of(
    rows: Sequence[Mapping[str, Any]], plan: Plan, device: ReportedDevice, *, program: tuple[str, str], now: float
) -> Report:
    """Return the report of the rows of `Bench.measure`. program: version and commit; now: seconds since 1970"""
    row = rows[0]
    return Report(
        form=FORM,
        date=_day(now),
        version=_clean(program[0], MAX_NAME_CHARACTERS),
        commit=_clean(program[1], MAX_NAME_CHARACTERS),
        device=device,
        model=ReportedModel(
            name=_clean(Path(row["model"]).name, MAX_TEXT_CHARACTERS),
            bytes=row["model_bytes"],
            quantization=_clean(row["quantization"], MAX_TEXT_CHARACTERS),
        ),
        plan=ReportedPlan(
            mode=plan.compute.mode,
            limit_bytes=plan.memory.limit_bytes,
            workers=row["workers"],
            resident_share=min(1.0, row["ffn_resident"]),
            context_tokens=plan.compute.context_tokens,
        ),
        tests=tuple(map(_test, rows)),
    )


def _test(row: Mapping[str, Any]) -> ReportedTest:
    return ReportedTest(
        name=row["test"],
        repetitions=row["repetitions"],
        min_tokens_per_s=row["tokens_per_s_least"],
        max_tokens_per_s=row["tokens_per_s_most"],
        p50_ms=row["tbt_ms"]["p50"],
        p90_ms=row["tbt_ms"]["p90"],
        p99_ms=row["tbt_ms"]["p99"],
        longest_ms=row["tbt_most_ms"],
        measured=_figures(row),
        planned=_figures(row["planned"]),
    )


def _figures(figures: Mapping[str, float | None]) -> Figures:
    return Figures(**{field.name: figures.get(field.name) for field in fields(Figures)})


def reported_device(
    device: Device, state: CacheState, *, name: str, release: str, android: Callable[[str], str], now: float
) -> ReportedDevice:
    """Return the machine as a report describes it.

    state: the cached measurements, after the probe that returned `device`
    name: the user's name for the machine, or an empty string
    release: the kernel's release, as uname names it
    android: reads a property, like `android_property`
    """
    allowed = [core for core in device.cores if core.allowed]
    return ReportedDevice(
        name=_clean(name or android("ro.product.model"), MAX_NAME_CHARACTERS),
        chip=_clean(android("ro.soc.model"), MAX_NAME_CHARACTERS),
        processor=_clean(device.processor, MAX_TEXT_CHARACTERS),
        architecture=device.architecture,
        cores=len(device.cores),
        allowed_cores=len(allowed),
        big_cores=sum(core.kind == "big" for core in allowed),
        mid_cores=sum(core.kind == "mid" for core in allowed),
        little_cores=sum(core.kind == "little" for core in allowed),
        cpu_quota_cores=device.cpu_quota,
        memory_total_bytes=device.memory_total_bytes,
        memory_available_bytes=device.memory_available_bytes,
        kernel=kernel_number(release),
        instruction_set=device.instruction_set,
        flash=None if device.flash is None else _flash(device.flash, state, now),
    )


def kernel_number(release: str) -> str:
    """Return the number at the beginning of a kernel's release. Who builds a kernel chooses the rest, often a name."""
    number = re.match(r"\d{1,5}(?:\.\d{1,5}){0,2}", release)
    return number[0] if number else ""


def _flash(curve: FlashCurve, state: CacheState, now: float) -> FlashFigures:
    """Return the speeds of a curve, and when it was measured: now, unless one of the cached measurements has it."""
    is_cached = state.flash is not None and state.flash.measured == curve
    is_profile = not is_cached and state.profile is not None and state.why_not is None
    taken_at = now
    if is_cached and state.flash is not None:
        taken_at = state.flash.taken_at
    elif is_profile and state.profile is not None:
        taken_at = state.profile.taken_at
    return FlashFigures(
        engine="io_uring" if curve.engine == "io_uring" else "threads",
        direct=curve.direct,
        measured_by="profile" if is_profile else "start",
        measured_on=_day(taken_at),
        busy=min(1.0, curve.busy),
        reads=tuple(
            FlashRead(request_bytes=size, depth=depth, bytes_per_s=round(curve.bytes_per_s(size, depth)))
            for size, depth in REPORTED_READS
        ),
    )


def this_program() -> tuple[str, str]:
    """Return the version of neuronpipe and its commit; an empty string for a commit that is not known."""
    installed = distribution("neuronpipe")
    if (CHECKOUT / ".git").exists():
        return installed.version, _checked_out_commit(CHECKOUT)
    try:
        origin = json.loads(installed.read_text("direct_url.json") or "{}")
        commit = str(origin.get("vcs_info", {}).get("commit_id", ""))
    except (ValueError, AttributeError):
        commit = ""
    return installed.version, commit if re.fullmatch(r"[0-9a-f]{7,64}", commit) else ""


def _checked_out_commit(checkout: Path) -> str:
    import subprocess  # imported here: most commands do not need it

    command = ["git", "--git-dir", str(checkout / ".git"), "--work-tree", str(checkout)]
    command += ["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False, timeout=GIT_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):  # there is no git, or the disk is slow
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def kernel_release() -> str:
    """Return the release of the operating system's kernel. The other fields of uname name the host."""
    return os.uname().release


def _day(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).date().isoformat()


def _clean(text: str, max_characters: int) -> str:
    """Return the text as a document may hold it: printable, and not longer than this."""
    return "".join(character for character in text if character.isprintable())[:max_characters]
