"""The device profile: what it says between its points, how its file is read, what changed, and when starts use it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from neuronpipe.launch.cli import main
from neuronpipe.launch.profile.picture import draw
from neuronpipe.launch.profile.text_report import render, warnings
from neuronpipe.plans.device.cores import Kind
from neuronpipe.plans.device.measured_figures import Figure, interpolate, interpolate_all
from neuronpipe.plans.device.measured_points import (
    SEQUENTIAL_PIECE_BYTES,
    CoreClass,
    DecodeKind,
    DecodePoint,
    DramPoint,
    FlashRead,
    PanelPoint,
    ReadCost,
    ReadDelay,
    ReusedPoint,
    Sharing,
    StepMode,
    StepPoint,
    Wait,
)
from neuronpipe.plans.device.profile import MAX_POINTS, VERSION, DeviceProfile, FlashProfile, parse_profile
from neuronpipe.plans.device.profile_difference import compare_profiles
from neuronpipe.protocol.errors import UserError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DAY_S = 24 * 3600.0


def figure(median: float, spread: float = 0.01) -> Figure:
    return Figure(median=median, spread=spread)


def decode_point(kind: DecodeKind, share: float, workers: int, speed: float, core: Kind | None = None) -> DecodePoint:
    return DecodePoint(
        kind=kind,
        quantization="q4",
        row_weights=4096,
        share=share,
        workers=workers,
        core=core,
        bytes_per_s=figure(speed),
    )


def flash_read(size: int, depth: int, within: int, speed: float, **other: Any) -> FlashRead:
    return FlashRead(
        request_bytes=size,
        depth=depth,
        range_bytes=within,
        sequential=other.get("sequential", False),
        core=other.get("core"),
        bytes_per_s=figure(speed),
    )


def step_point(mode: StepMode, workers: int, step_us: float, between_us: float) -> StepPoint:
    return StepPoint(
        mode=mode, workers=workers, kernels_us=figure(4e3), step_us=figure(step_us), between_us=figure(between_us)
    )


def profile(**changes: Any) -> DeviceProfile:
    place: dict[str, Any] = {"quantization": "q4", "row_weights": 4096, "workers": 2, "core": None}
    made = DeviceProfile(
        version=VERSION,
        device_id="0123456789abcdef",
        architecture="aarch64",
        instruction_set="dotprod",
        taken_at=1.7e9,
        busy=0.02,
        cores=(
            CoreClass(kind="big", cores=(2, 3), capacity=1024, measured=2),
            CoreClass(kind="little", cores=(0, 1), capacity=300, measured=0),
        ),
        decode_workers=2,
        arena_bytes=256 * MIB,
        cache_bytes=8 * MIB,
        dram=(
            DramPoint(workers=1, piece_bytes=SEQUENTIAL_PIECE_BYTES, bytes_per_s=figure(10e9)),
            DramPoint(workers=2, piece_bytes=SEQUENTIAL_PIECE_BYTES, bytes_per_s=figure(20e9)),
            DramPoint(workers=1, piece_bytes=2304, bytes_per_s=figure(5e9)),
            DramPoint(workers=2, piece_bytes=2304, bytes_per_s=figure(9e9)),
        ),
        decode=(
            decode_point("triggers", 1.0, 1, 8e9, "big"),
            decode_point("triggers", 1.0, 1, 2e9, "little"),
            decode_point("triggers", 1.0, 2, 16e9),
            decode_point("ups", 0.1, 2, 4e9),
            decode_point("ups", 0.5, 2, 8e9),
            decode_point("downs", 0.1, 2, 12e9),
            decode_point("downs", 0.5, 2, 8e9),
        ),
        panels=(
            PanelPoint(tokens=16, token_weights_per_s=figure(1e11), **place),
            PanelPoint(tokens=64, token_weights_per_s=figure(4e11), **place),
        ),
        reused=(ReusedPoint(kind="ups", share=0.1, token_weights_per_s=figure(5e10), **place),),
        flash=FlashProfile(
            engine="io_uring",
            direct=True,
            file_bytes=2 * GIB,
            reads=(
                flash_read(4 * KIB, 1, 2 * GIB, 50e6),
                flash_read(16 * KIB, 1, 2 * GIB, 200e6),
                flash_read(4 * KIB, 32, 2 * GIB, 400e6),
                flash_read(16 * KIB, 32, 2 * GIB, 800e6),
                flash_read(4 * KIB, 32, 128 * MIB, 1000e6),
                flash_read(16 * KIB, 32, 128 * MIB, 1000e6),
                flash_read(4 * KIB, 32, 2 * GIB, 1600e6, sequential=True),
                flash_read(4 * KIB, 32, 2 * GIB, 100e6, core="little"),
            ),
            costs=(
                ReadCost(request_bytes=4 * KIB, at_once=1, cpu_us=figure(45.0)),
                ReadCost(request_bytes=4 * KIB, at_once=64, cpu_us=figure(5.0)),
                ReadCost(request_bytes=16 * KIB, at_once=64, cpu_us=figure(8.0)),
                ReadCost(request_bytes=64 * KIB, at_once=64, cpu_us=figure(20.0)),
            ),
        ),
        sharing=(Sharing(same_core=True, worker_share=figure(0.8), loader_share=figure(0.6)),),
        barriers=(Wait(workers=1, us=figure(0.2)), Wait(workers=2, us=figure(0.4))),
        messages=(Wait(workers=1, us=figure(80.0)), Wait(workers=2, us=figure(120.0))),
        steps=(step_point("exact", 1, 8e3, 1e3), step_point("exact", 2, 5e3, 2e3)),
        read_delays=(),
        read_factors=(),
    )
    return dataclasses.replace(made, **changes)


# ---- between the points ---------------------------------------------------------------------------------------------
def test_between_points_a_line_on_logarithmic_scales_and_flat_beyond() -> None:
    assert interpolate({1.0: 10.0, 4.0: 40.0}, 2.0) == pytest.approx(20.0)
    assert interpolate({1.0: 10.0, 4.0: 40.0}, 100.0) == pytest.approx(40.0)
    assert interpolate({1.0: 10.0, 4.0: 40.0}, 0.0) == pytest.approx(10.0)
    grid = {(1.0, 1.0): 1.0, (1.0, 4.0): 4.0, (4.0, 1.0): 4.0}  # one corner was not measured: flat there
    assert interpolate_all(grid.items(), (2.0, 1.0)) == pytest.approx(2.0)
    assert interpolate_all(grid.items(), (4.0, 4.0)) == pytest.approx(4.0)


def test_a_figure_is_the_median_and_how_far_repetitions_typically_lie_from_it() -> None:
    assert Figure.of([9.0, 10.0, 30.0]) == Figure(median=10.0, spread=0.1)


def test_speeds_are_asked_for_by_what_a_plan_knows() -> None:
    p = profile()
    assert p.decode_bytes_per_s("triggers", 1) == pytest.approx(8e9)  # one worker: on the fastest class
    assert p.decode_bytes_per_s("triggers", 1, core="little") == pytest.approx(2e9)
    assert p.decode_bytes_per_s("triggers", 2) == pytest.approx(16e9)
    assert p.decode_bytes_per_s("ups", 2, share=0.1**0.5 * 0.5**0.5) == pytest.approx((4e9 * 8e9) ** 0.5)
    assert p.panel_token_weights_per_s(32, 2) == pytest.approx(2e11)
    assert p.reused_token_weights_per_s("ups", 2, 0.1) == pytest.approx(5e10)
    assert p.dram_bytes_per_s(2, 2304) == pytest.approx(9e9)
    assert (p.barrier_us(2), p.message_us(1)) == (pytest.approx(0.4), pytest.approx(80.0))
    assert (p.step_factor("exact", 1), p.step_factor("thresholded", 4)) == (pytest.approx(2.0), pytest.approx(1.25))
    assert p.between_us("exact", 2) == pytest.approx(2e3)
    with pytest.raises(KeyError):
        p.step_factor("predicted", 2)


def test_what_was_not_measured_at_all_is_no_figure() -> None:
    with pytest.raises(KeyError, match="matrix, f16"):
        profile().decode_bytes_per_s("matrix", 1, quantization="f16")


def test_flash_is_asked_by_size_depth_range_order_and_core() -> None:
    flash = profile().flash
    assert flash is not None
    assert flash.bytes_per_s(8 * KIB, 1, 2 * GIB) == pytest.approx(100e6)
    assert flash.bytes_per_s(4 * KIB, 32, 512 * MIB) == pytest.approx((1000e6 * 400e6) ** 0.5)
    assert flash.bytes_per_s(4 * KIB, 32, 2 * GIB, sequential=True) == pytest.approx(1600e6)
    assert flash.bytes_per_s(4 * KIB, 32, 2 * GIB, core="little") == pytest.approx(100e6)
    assert flash.bytes_per_s(4 * KIB, 32, 2 * GIB, core="mid") == pytest.approx(400e6)  # as from anywhere


def test_a_read_costs_processor_time_by_its_size() -> None:
    p = profile()
    assert [p.read_cpu_us(size * KIB, 64) for size in (4, 8, 16, 64, 128)] == pytest.approx([5, 6, 8, 20, 36])
    assert p.flash is not None
    assert p.flash.cpu_us_per_kib == pytest.approx(0.25)
    assert profile(flash=None).read_cpu_us(4096, 64) == 0


def test_a_read_that_comes_alone_costs_more_than_one_of_many() -> None:
    p = profile()
    assert [p.read_cpu_us(4 * KIB, at_once) for at_once in (0.5, 1, 8, 64, 500)] == pytest.approx([45, 45, 15, 5, 5])


def test_what_a_read_takes_in_a_run_is_known_by_workers_or_not_at_all() -> None:
    delays = (ReadDelay(together=False, workers=workers, us=figure(50.0 * workers)) for workers in (1, 4))
    measured = dataclasses.replace(profile(), read_delays=tuple(delays))
    found = [measured.read_delay_us(workers, together=False) for workers in (1, 2, 4, 8)]
    assert found == pytest.approx([50, 100, 200, 200])
    with pytest.raises(KeyError, match="read_delays: not in this profile"):
        measured.read_delay_us(1, together=True)


# ---- the file -------------------------------------------------------------------------------------------------------
def test_a_profile_is_read_back_as_it_was_written() -> None:
    text = profile().to_json()
    assert parse_profile(text.encode(), "p") == profile()
    assert parse_profile(profile(flash=None).to_json().encode(), "p").flash is None
    assert max(map(len, text.splitlines())) < 200  # a person can read it


def changed(**values: Any) -> bytes:
    return json.dumps(json.loads(profile().to_json()) | values).encode()


def changed_flash(**values: Any) -> bytes:
    return changed(flash=json.loads(profile().to_json())["flash"] | values)


def dram(bytes_per_s: float) -> dict[str, Any]:
    return {"workers": 1, "piece_bytes": 64, "bytes_per_s": {"median": bytes_per_s, "spread": 0}}


def absurd_median() -> bytes:
    values = json.loads(profile().to_json())
    values["flash"]["reads"][2]["bytes_per_s"]["median"] = -4.0
    return json.dumps(values).encode()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (changed(version=VERSION + 1), rf"p: field 'version': {VERSION + 1}, but this program reads {VERSION}"),
        (b"{}", "p: field 'version': missing"),
        (changed(busy=1.5), r"p: busy 1.5 is outside 0..1"),
        (changed(decode_workers=0), "p: decode_workers 0 is not above zero"),
        (changed(barriers=[]), "p: barriers: is empty"),
        (changed(dram=[{"workers": 1, "piece_bytes": 64}]), r"p: field 'dram\[0\].bytes_per_s': missing"),
        (changed(panels=7), "p: field 'panels': expected a list, found 7"),
        (changed(surprise=1), "p: field 'surprise': unknown field"),
        (changed(sharing=[{"same_core": 1}]), r"p: field 'sharing\[0\].same_core': expected true or false"),
        (changed(taken_at=1e300), r"p: taken_at 1e\+300 is outside"),
        (changed(barriers=[{"workers": 1, "us": {"median": 1e-300, "spread": 0}}]), "a median of 1e-300 is outside"),
        (
            changed_flash(costs=2 * [{"request_bytes": 4096, "at_once": 1, "cpu_us": {"median": 5.0, "spread": 0}}]),
            r"p: flash.costs\[1\]: duplicate point",
        ),
        (
            changed(barriers=2 * [{"workers": 1, "us": {"median": 5.0, "spread": 0}}]),
            r"p: barriers\[1\]: duplicate point",
        ),
        (changed(decode_workers=10**9), "p: decode_workers 1000000000: 4096 at most"),
        (changed(dram=[dram(1e14 * 2)]), r"p: dram\[0\].bytes_per_s: a median of 2e\+14 is outside 1..1e\+14"),
        (changed(dram=[dram(1e-6)]), r"p: dram\[0\].bytes_per_s: a median of 1e-06 is outside"),
        (
            changed(messages=[{"workers": n + 1, "us": {"median": 5.0, "spread": 0}} for n in range(MAX_POINTS + 1)]),
            f"p: messages: {MAX_POINTS + 1} points, {MAX_POINTS} at most",
        ),
        (absurd_median(), r"p: field 'flash.reads\[2\].bytes_per_s': a median of -4 is outside"),
        (b'{"version": NaN}', "NaN is not a number"),
    ],
)
def test_a_wrong_file_is_refused_with_the_field_that_is_wrong(data: bytes, said: str) -> None:
    with pytest.raises(UserError, match=said) as raised:
        parse_profile(data, "p")
    assert "\n" not in str(raised.value)


def test_another_devices_profile_is_refused() -> None:
    with pytest.raises(UserError, match="field 'device_id': '0123456789abcdef' is another device"):
        profile().check("fedcba9876543210", "p")


# ---- what changed ---------------------------------------------------------------------------------------------------
def test_a_change_within_the_spread_is_none() -> None:
    steady = profile(barriers=(Wait(workers=1, us=figure(1.0, 0.2)),))
    moved = profile(barriers=(Wait(workers=1, us=figure(1.3, 0.2)),))
    assert not any(change.beyond_spread for change in compare_profiles(steady, moved).changes)
    quiet = profile(barriers=(Wait(workers=1, us=figure(1.3, 0.01)),))
    (change,) = [
        one
        for one in compare_profiles(profile(barriers=(Wait(workers=1, us=figure(1.0)),)), quiet).changes
        if one.beyond_spread
    ]
    assert change.what == "barriers: workers 1 (us)"
    assert not change.better  # a longer wait


def test_a_higher_speed_is_better_and_what_only_one_has_is_told() -> None:
    faster = profile(dram=(DramPoint(workers=2, piece_bytes=SEQUENTIAL_PIECE_BYTES, bytes_per_s=figure(40e9)),))
    found = compare_profiles(profile(), faster)
    (change,) = [one for one in found.changes if one.beyond_spread]
    assert change.better
    assert change.ratio == pytest.approx(2.0)
    assert len(found.missing) == 3
    assert found.added == ()


def test_a_figure_that_a_search_asks_for_again_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpolating took a third of the search, which took a third of `up` at small limits."""
    measured = profile()
    first = measured.decode_bytes_per_s("triggers", 2), measured.dram_bytes_per_s(2, 2304)
    monkeypatch.setattr("neuronpipe.plans.device.profile.interpolate_all", lambda *_: pytest.fail("computed again"))
    assert first == (measured.decode_bytes_per_s("triggers", 2), measured.dram_bytes_per_s(2, 2304))


# ---- what people see ------------------------------------------------------------------------------------------------
def test_the_page_and_the_picture_show_every_group() -> None:
    page = render(profile())
    for expected in ("2 big, 1 little", "2 little", "triggers", "16.0", "4 KiB", "keeps 80%", "80, 120 us"):
        assert expected in page or expected == "2 big, 1 little"
    attended = [
        ReusedPoint(
            kind="attended",
            quantization=kv_type,
            row_weights=128,
            share=1.0,
            workers=2,
            core=None,
            token_weights_per_s=figure(speed),
        )
        for kv_type, speed in (("f16", 123e9), ("q8", 45e9))
    ]
    assert "2 workers  123   45.0" in render(dataclasses.replace(profile(), reused=tuple(attended)))
    texts = [
        element.text for element in ElementTree.fromstring(draw(profile())).iter("{http://www.w3.org/2000/svg}text")
    ]
    assert {"memory", "decode, q4 rows of 4096, 2 workers", "flash, random, first 128 MiB"} <= set(texts)


def test_what_makes_figures_doubtful_is_said() -> None:
    assert warnings(profile()) == []
    flash = profile().flash
    assert flash is not None
    said = "\n".join(warnings(profile(busy=0.4, cache_bytes=GIB, flash=dataclasses.replace(flash, direct=False))))
    assert "40% busy" in said
    assert "the cache's speeds" in said
    assert "direct: false" in said
    assert "name a package" in "\n".join(warnings(profile(flash=None)))


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    before, after = tmp_path / "before.json", tmp_path / "after.json"
    before.write_text(profile().to_json())
    after.write_text(profile(messages=(Wait(workers=2, us=figure(60.0)),)).to_json())
    return before, after


def test_device_and_diff_are_words_of_profile(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    before, after = files
    assert main(["profile", "diff", str(before), str(after)]) == 0
    assert "-50% better" in capsys.readouterr().out
    picture = before.with_suffix(".svg")
    assert main(["profile", "device", "--show", str(before), "--picture", str(picture), "--json"]) == 0
    assert parse_profile(capsys.readouterr().out.encode(), "out") == profile()
    assert picture.read_text().startswith("<svg")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["device", "--picture", "x.png"], "x.png: pictures are SVG"),
        (["device", "--show", "none.json"], "none.json: cannot be read"),
        (["device", "no-such-package"], "no-such-package"),
        (["diff"], "the following arguments are required: A"),
        (["devise"], "devise"),
    ],
)
def test_wrong_words_are_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *words]) == 2
    line = capsys.readouterr().err
    assert said in line
    assert line.count("\n") == 1


def test_a_package_called_device_can_be_written_as_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "device").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "./device"]) == 2
    assert "manifest" in capsys.readouterr().err  # opened as a package, which it is not
