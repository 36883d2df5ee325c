"""A device profile, and the changes from one to another, as readable text."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from neuronpipe.launch.formats import show_bytes
from neuronpipe.plans.device.measured_figures import Figure
from neuronpipe.plans.device.measured_points import SEQUENTIAL_PIECE_BYTES, DecodePoint
from neuronpipe.plans.device.profile import DeviceProfile, FlashProfile
from neuronpipe.plans.device.profile_difference import Difference
from neuronpipe.plans.measure.cached_profile import doubt
from neuronpipe.protocol.errors import safe_name

UNSTEADY = 0.15  # figures with a larger spread are marked


def render(profile: DeviceProfile) -> str:
    lines = _head(profile)
    lines += _memory(profile)
    lines += _decode(profile)
    lines += _prefill(profile)
    if profile.flash is not None:
        lines += _flash(profile, profile.flash)
    lines += _waits(profile)
    lines += _accelerator(profile)
    lines += ["", *warnings(profile)]
    return "\n".join(lines).rstrip()


def warnings(profile: DeviceProfile) -> list[str]:
    """Return one line per reason to distrust the figures."""
    lines = []
    if (reason := doubt(profile)) is not None:
        lines.append(f"doubtful: {reason}; starts do not use it. Close other programs and measure again")
    unsteady = sum(figure.spread > UNSTEADY for _, figure in profile.figures())
    if unsteady:
        lines.append(f"{unsteady} figures have repetitions over {UNSTEADY:.0%} apart (~)")
    if not profile.dram:
        lines.append("memory and kernels were not measured: too little memory is available; close other programs")
    elif profile.arena_bytes < 2 * profile.cache_bytes:
        lines.append(
            f"kernels were measured on {show_bytes(profile.arena_bytes)}, and a cache of this processor has "
            f"{show_bytes(profile.cache_bytes)}: they may be the cache's speeds"
        )
    if profile.flash is None:
        lines.append("flash was not measured: name a package that is larger, `neuronpipe profile device PACKAGE`")
    elif not profile.flash.direct:
        lines.append(
            "this file system reads without direct I/O, through the page cache: its flash figures are the cache's "
            "(marked `direct: false`); move the package to ext4, xfs, f2fs or btrfs"
        )
    return lines


def _head(profile: DeviceProfile) -> list[str]:
    cores = ", ".join(f"{len(core_class.cores)} {safe_name(core_class.kind)}" for core_class in profile.cores)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(profile.taken_at))
    return [
        f"device {safe_name(profile.device_id)}, {safe_name(profile.architecture)}, "
        f"{safe_name(profile.instruction_set)}; "
        f"cores: {cores}; {profile.decode_workers} decode workers",
        f"measured {when}; other programs had {profile.busy:.0%} of the machine; "
        f"repetitions are typically {profile.spread:.1%} apart",
    ]


def _table(title: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    cells = [list(head), *(list(row) for row in rows)]
    widths = [max(len(row[n]) for row in cells) for n in range(len(head))]
    lines = [
        "  "
        + row[0].ljust(widths[0])
        + "".join(cell.rjust(width + 2) for cell, width in zip(row[1:], widths[1:], strict=True))
        for row in cells
    ]
    return ["", title, *lines]


def _speed(figure: Figure | None, unit: float = 1e9) -> str:
    if figure is None:
        return "-"
    value = figure.median / unit
    text = f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
    return text + ("~" if figure.spread > UNSTEADY else " ")


def _memory(profile: DeviceProfile) -> list[str]:
    if not profile.dram:
        return []
    speeds = {(point.workers, point.piece_bytes): point.bytes_per_s for point in profile.dram}
    sizes = sorted({size for _, size in speeds}, key=lambda size: (size != SEQUENTIAL_PIECE_BYTES, size))
    head = ["workers", *("end to end" if size == SEQUENTIAL_PIECE_BYTES else f"{size} B" for size in sizes)]
    workers = sorted({count for count, _ in speeds})
    rows = ([str(count), *(_speed(speeds.get((count, size))) for size in sizes)] for count in workers)
    return _table("memory, GB/s, by size of the pieces", head, rows)


def _place(point: DecodePoint | object) -> str:
    core, workers = getattr(point, "core", None), getattr(point, "workers", 1)
    return f"one {core}" if core is not None else f"{workers} workers"


def _decode(profile: DeviceProfile) -> list[str]:
    if not profile.decode:
        return []
    places = list(dict.fromkeys(_place(point) for point in profile.decode))
    shapes = list(dict.fromkeys((point.quantization, point.row_weights) for point in profile.decode))
    speeds = {
        (point.kind, point.share, point.quantization, point.row_weights, _place(point)): point.bytes_per_s
        for point in profile.decode
    }
    kinds = list(dict.fromkeys((point.kind, point.share) for point in profile.decode))
    columns = [(shape, place) for shape in shapes for place in places]
    lines = []
    for place in places:
        head = ["rows", *(f"{quantization} {weights}" for quantization, weights in shapes)]
        rows = (
            [
                _kind(kind, share),
                *(
                    _speed(speeds.get((kind, share, *shape, shape_place)))
                    for shape, shape_place in columns
                    if shape_place == place
                ),
            ]
            for kind, share in kinds
        )
        lines += _table(f"decode kernels, GB/s of weights, {place}", head, rows)
    return lines


def _kind(kind: str, share: float) -> str:
    name = kind.replace("_", " ")
    return name if share == 1 else f"{name}, {share:.0%}"


def _prefill(profile: DeviceProfile) -> list[str]:
    if not profile.panels:
        return []
    shapes = list(dict.fromkeys((point.quantization, point.row_weights) for point in profile.panels))
    columns = ["prefill", *(f"{quantization} {weights}" for quantization, weights in shapes)]
    rows: dict[str, dict[tuple[str, int], Figure]] = {}
    for panel in profile.panels:
        name = f"panel of {panel.tokens} tokens, {_place(panel)}"
        rows.setdefault(name, {})[panel.quantization, panel.row_weights] = panel.token_weights_per_s
    for reused in (point for point in profile.reused if point.kind != "attended"):
        name = f"{_kind(reused.kind, reused.share)}, {_place(reused)}"
        rows.setdefault(name, {})[reused.quantization, reused.row_weights] = reused.token_weights_per_s
    cells = ([name, *(_speed(figures.get(shape)) for shape in shapes)] for name, figures in rows.items())
    attended: dict[str, dict[str, Figure]] = {}
    for point in (point for point in profile.reused if point.kind == "attended"):
        attended.setdefault(_place(point), {})[point.quantization] = point.token_weights_per_s
    types = list(dict.fromkeys(kv_type for figures in attended.values() for kv_type in figures))
    of_attention = (
        [place, *(_speed(figures.get(kv_type)) for kv_type in types)] for place, figures in attended.items()
    )
    return [
        *_table("prefill kernels, 10^9 tokens x weights a second; ups and downs from the cache", columns, cells),
        *_table("attention, 10^9 heads x elements a second, by the KV cache's type", ["", *types], of_attention),
    ]


def _flash(profile: DeviceProfile, flash: FlashProfile) -> list[str]:
    lines = []
    reads = [read for read in flash.reads if read.core is None]
    kinds = list(dict.fromkeys((read.range_bytes, read.sequential) for read in reads))
    sizes = sorted({read.request_bytes for read in reads})
    for range_bytes, sequential in kinds:
        range_name = "whole file" if range_bytes == flash.file_bytes else "first"
        order = "sequential" if sequential else "random"
        speeds = {
            (read.depth, read.request_bytes): read.bytes_per_s
            for read in reads
            if (read.range_bytes, read.sequential) == (range_bytes, sequential)
        }
        rows = (
            [str(depth), *(_speed(speeds.get((depth, size)), 1e6) for size in sizes)]
            for depth in sorted({depth for depth, _ in speeds})
        )
        title = f"flash, MB/s, {order}, {range_name} {show_bytes(range_bytes)}, by reads under way and their size"
        lines += _table(title, ["depth", *(show_bytes(size).replace(".0", "") for size in sizes)], rows)
    by_class = {(r.core, r.depth, r.request_bytes): r.bytes_per_s for r in flash.reads if r.core is not None}
    if by_class:
        points = sorted({key[1:] for key in by_class})
        rows = (
            [f"{core_class.kind} core", *(_speed(by_class.get((core_class.kind, *point)), 1e6) for point in points)]
            for core_class in profile.cores
        )
        lines += _table(
            "flash, MB/s, by who issues the reads",
            ["", *(f"{size >> 10} KiB x{depth}" for depth, size in points)],
            rows,
        )
    return lines + _costs(profile, flash)


def _costs(profile: DeviceProfile, flash: FlashProfile) -> list[str]:
    lines = []
    if flash.costs:
        numbers = sorted({cost.at_once for cost in flash.costs})
        rows = [
            [show_bytes(size), *(f"{flash.read_cpu_us(size, number):.1f}" for number in numbers)]
            for size in sorted({cost.request_bytes for cost in flash.costs})
        ]
        lines += _table("processor time of one read, us, by how many at once", ["", *map(str, numbers)], rows)
        lines += [f"{flash.cpu_us_per_kib:.2f} us for a KiB more"]
    for sharing in profile.sharing:
        where = "on one core" if sharing.same_core else "on two cores"
        lines.append(
            f"worker and loader {where}: the worker keeps {sharing.worker_share.median:.0%} of its speed, the loader "
            f"{sharing.loader_share.median:.0%}"
        )
    return lines


def _waits(profile: DeviceProfile) -> list[str]:
    barriers = ", ".join(f"{point.us.median:.2f}" for point in profile.barriers)
    messages = ", ".join(f"{point.us.median:.0f}" for point in profile.messages)
    lines = [
        "",
        f"a barrier: {barriers} us with 1, 2, ... workers; a step's messages, there and back: {messages} us",
    ]
    for step in profile.steps:
        workers = "1 worker" if step.workers == 1 else f"{step.workers} workers"
        lines.append(
            f"a step of a run, {step.mode}, {workers}: {step.step_us.median / 1e3:.2f} ms, its kernels by themselves "
            f"{step.kernels_us.median / 1e3:.2f}; {step.between_us.median / 1e3:.2f} ms to the next one"
        )
    for delay in profile.read_delays:
        workers = "1 worker" if delay.workers == 1 else f"{delay.workers} workers"
        how = "named with others" if delay.together else "named by itself"
        lines.append(f"a read in a run, {how}, {workers}: {delay.us.median:.0f} us more than the flash takes")
    for point in profile.read_factors:
        workers = "1 worker" if point.workers == 1 else f"{point.workers} workers"
        lines.append(f"processor time of a read in a run, {workers}: {point.factor.median:.1f} times that by itself")
    return lines


def _accelerator(profile: DeviceProfile) -> list[str]:
    accelerator = profile.accelerator
    if accelerator is None:
        return [
            "no accelerator measured: a GPU with an OpenCL driver and `pip install 'neuronpipe[gpu]'` are one, which "
            "`neuronpipe profile device` then measures"
        ]
    owner = "of this machine's" if accelerator.shares_memory else "of its own"
    on_cores = ", which computes on this processor's cores" if accelerator.is_processor else ""
    shapes = list(dict.fromkeys((point.quantization, point.row_weights) for point in accelerator.held))
    figures = {(p.kind, p.share, p.texts, p.quantization, p.row_weights): p.bytes_per_s for p in accelerator.held}
    kinds = sorted({(point.kind, point.share, point.texts) for point in accelerator.held})
    rows = (
        [f"{kind}, {share:.0%}, {sequences} sequence{'s' if sequences > 1 else ''}"]
        + [_speed(figures.get((kind, share, sequences, *shape))) for shape in shapes]
        for kind, share, sequences in kinds
    )
    lines = _table(
        f"accelerator {safe_name(accelerator.name)} by {safe_name(accelerator.backend)}, "
        f"{show_bytes(accelerator.memory_bytes)} {owner}{on_cores}: offloaded blocks, GB/s of weights",
        ["neurons that fire", *(f"{quantization} {weights}" for quantization, weights in shapes)],
        rows,
    )
    in_runs = ", ".join(f"{point.us.median:.0f} us {point.mode}" for point in accelerator.in_runs)

    def visits(routed: bool) -> str:
        points = [point for point in accelerator.visits if point.routed == routed]
        return ", ".join(f"{point.us.median:.0f}" for point in sorted(points, key=lambda point: point.texts))

    def copies(back: bool) -> str:
        points = [point for point in accelerator.copies if point.back == back]
        return ", ".join(
            f"{point.bytes_per_s.median / 1e9:.2g} GB/s of {show_bytes(point.copy_bytes).replace('.0', '')}"
            for point in sorted(points, key=lambda point: point.copy_bytes)
        )

    return [
        *lines,
        f"a layer's call besides: {visits(routed=False)} us with 1, 2, ... sequences, "
        f"of a mixture {visits(routed=True)} us; "
        f"the smallest kernel: {accelerator.launch_us:.0f} us",
        f"copies to it: {copies(back=False)}; back: {copies(back=True)}",
        *([f"a layer in a run besides: {in_runs}"] if in_runs else []),
    ]


def render_difference(difference: Difference, before: str, after: str) -> str:
    """Return the changes, the largest first; then the figures that only one profile has."""
    changed = sorted(
        (change for change in difference.changes if change.beyond_spread),
        key=lambda candidate: -abs(_log(candidate.ratio)),
    )
    lines = [
        f"{len(changed)} of {len(difference.changes)} figures changed beyond their spread from {before} to {after}"
    ]
    for change in changed:
        verdict = "better" if change.better else "worse"
        lines.append(
            f"  {change.ratio - 1:+6.0%} {verdict:<6} {_value(change.before, change.unit)} -> "
            f"{_value(change.after, change.unit)}  {change.what}"
        )
    for name, keys in (("only before", difference.missing), ("only after", difference.added)):
        lines += [f"{name}: {len(keys)} figures, such as {keys[0]}"] if keys else []
    return "\n".join(lines)


def _log(ratio: float) -> float:
    return ratio if ratio >= 1 else 1 / ratio


def _value(figure: Figure, unit: str) -> str:
    value, short = figure.median, unit.rpartition("_")[2]
    if unit.endswith("per_s"):
        what = "B/s" if unit == "bytes_per_s" else " weights/s"
        value, short = (value / 1e9, f"G{what}") if value >= 1e9 else (value / 1e6, f"M{what}")
    return f"{value:.3g} {short} (±{figure.spread:.0%})"
