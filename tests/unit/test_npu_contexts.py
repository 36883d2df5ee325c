"""What graphs were prepared as for a chip: only what suits the chip, the runtime and the model is taken; and what the
doctor says of a machine that has such a chip."""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from neuronpipe.launch.cli import main
from neuronpipe.launch.doctor import npu
from neuronpipe.launch.doctor.checks import Check
from neuronpipe.launch.doctor.npu import npu_checks
from neuronpipe.plans.package.reader import Package
from neuronpipe.protocol.errors import UserError
from neuronpipe.services.offload.npu import chips, providers
from neuronpipe.services.offload.npu.chips import CHIPS, DetectedChip, chip_of, find_chip
from neuronpipe.services.offload.npu.graph_files import INDEX, contexts_for, folder_of, write_graphs
from neuronpipe.services.offload.npu.providers import Provider, provider_of
from neuronpipe.services.offload.npu.sessions import Runtime

from tests.conformance.specs import SPECS, write_package

pytest.importorskip("onnx")

CHIP, QNN = chip_of("57"), "2.40.0-5.51.0"


def nothing(_: str) -> str:
    """A machine that is no Android."""
    return ""


def machine(folder: Path, **facts: str) -> Path:
    """The root of a file system that says so of its chip."""
    soc = folder / "sys" / "devices" / "soc0"
    soc.mkdir(parents=True)
    for name, text in facts.items():
        (soc / name).write_text(f"{text}\n")
    return folder


@pytest.fixture
def package(tmp_path: Path) -> Package:
    """With contexts for CHIP of 64 neurons that say what they are, and nothing else."""
    made = write_package(tmp_path / "package", SPECS["scaled"], "q8")
    folder = folder_of(made.path, CHIP, 64)
    write_graphs(folder, made.manifest, 64, chip=CHIP, qnn=QNN, prepare=lambda graph: graph.name.encode())
    return made


def test_chips_are_told_apart() -> None:
    assert len({chip.soc for chip in CHIPS}) == len({chip.name for chip in CHIPS}) == len(CHIPS)
    numbers = [number for chip in CHIPS for number in chip.soc_ids]
    assert len(set(numbers)) == len(numbers)
    assert chip_of("sm8650") is chip_of("57") is CHIP


@pytest.mark.parametrize(
    ("facts", "properties", "found"),
    [
        ({"soc_id": "557", "machine": "SM8650", "family": "Snapdragon"}, {}, DetectedChip("SM8650, soc_id 557", CHIP)),
        (
            {"soc_id": "577", "machine": "Pineapple", "family": "Snapdragon"},
            {},
            DetectedChip("Pineapple, soc_id 577", CHIP),
        ),
        ({}, {"ro.soc.model": "SM8650-AC", "ro.soc.manufacturer": "QTI"}, DetectedChip("SM8650-AC", CHIP)),
        ({"soc_id": "9", "family": "Snapdragon"}, {}, DetectedChip("soc_id 9", None)),
        ({}, {"ro.soc.model": "MT6983", "ro.soc.manufacturer": "MediaTek"}, None),
        ({"soc_id": "i.MX8MQ", "family": "Freescale i.MX"}, {}, None),
        ({}, {}, None),
    ],
)
def test_a_machine_is_asked_for_its_chip(
    tmp_path: Path, facts: dict[str, str], properties: dict[str, str], found: DetectedChip | None
) -> None:
    assert find_chip(machine(tmp_path, **facts), lambda name: properties.get(name, "")) == found


def test_a_chip_that_is_named_decides_the_numerics() -> None:
    for text, numerics in (
        ("57", "htp-v73"),
        ("SM8550", "htp-v73"),
        ("36", "htp-v68"),  # in emulation they compute other bits: up to 33 of 65,535 steps from the others
    ):
        assert Provider("qnn-emulated", chip_of(text)).numerics == numerics
    assert Provider("qnn", CHIP).numerics == "hexagon-v75"


def test_a_machine_whose_chip_nobody_knows_is_asked_for_one_like_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(providers, "require_modules", lambda provider: None)
    monkeypatch.setattr(providers, "find_chip", lambda: DetectedChip("SM9999", None))
    with pytest.raises(UserError, match=r"this machine's chip, SM9999, is not known here; name one .* onnx:qnn:57"):
        provider_of("qnn")
    monkeypatch.setattr(providers, "find_chip", lambda: DetectedChip("SM8650", CHIP))
    assert provider_of("qnn") == Provider("qnn", CHIP)


@pytest.mark.skipif(platform.machine() == "aarch64", reason="there may be one")
def test_an_emulator_is_not_taken_for_a_device() -> None:
    with pytest.raises(UserError, match=r"backend onnx:qnn: this machine is no 64-bit Arm; onnx:qnn-emulated"):
        Runtime(Provider("qnn", CHIP))


def test_contexts_come_by_their_graphs(package: Package) -> None:
    from neuronpipe.services.offload.npu.graph_files import model_graphs

    contexts = contexts_for(package.path, package.manifest, CHIP, 64, QNN)
    assert contexts is not None
    for graph in model_graphs(package.manifest, 64):
        assert contexts(graph) == graph.name.encode()
    assert contexts_for(package.path, package.manifest, chip_of("69"), 64, QNN) is None


def edited(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """The index, changed."""

    def edit(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index)
        (folder / INDEX).write_text(json.dumps(index))

    return edit


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (
            edited(lambda index: index.update(version=1)),
            r"version: 1 does not fit; here it is 3; compile again: `neuro",
        ),
        (edited(lambda index: index.update(format="other")), r"format: 'other' does not fit"),
        (edited(lambda index: index["chip"].update(soc=69)), r"chip: .*'soc': 69.* does not fit; .*'soc': 57"),
        (edited(lambda index: index.pop("chip")), r"chip: None does not fit"),
        (edited(lambda index: index.update(qnn="1.0.0")), r"qnn: '1.0.0' prepared these contexts, and '2.40.0-5.51.0'"),
        (edited(lambda index: index.update(width=32)), r"width: 32 does not fit"),
        (edited(lambda index: index["matrices"][0]["y"].update(step=1.0)), r"matrices: .* does not fit"),
        (edited(lambda index: index["feed_forward"].pop("sha256")), r"files: its checksums are not what they must be"),
        (lambda folder: (folder / INDEX).write_text("{"), r"graphs\.json: "),
        (
            lambda folder: (folder / "feed_forward-64.onnx").write_bytes(b""),
            r"feed_forward-64\.onnx: does not match its",
        ),
        (lambda folder: (folder / "feed_forward-64.onnx").unlink(), r"feed_forward-64\.onnx: cannot be read"),
    ],
)
def test_contexts_that_do_not_suit_are_refused_in_one_line(
    package: Package, damage: Callable[[Path], None], why: str
) -> None:
    damage(folder_of(package.path, CHIP, 64))

    def take() -> None:
        contexts = contexts_for(package.path, package.manifest, CHIP, 64, QNN)
        assert contexts is not None
        contexts.check_files()

    with pytest.raises(UserError, match=why) as refused:
        take()
    assert "\n" not in str(refused.value)


def test_contexts_of_another_size_are_refused(package: Package) -> None:
    with pytest.raises(
        UserError, match=r"of 64 neurons, and this plan computes 128 at once; compile: `neuronpipe comp"
    ):
        contexts_for(package.path, package.manifest, CHIP, 128, QNN)


def test_compiling_refuses_a_chip_that_nobody_knows(package: Package, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", str(package.path), "--soc", "9"]) == 2
    assert "chip '9': it is not known here; the chips are 30 SM8350" in capsys.readouterr().err
    assert main(["compile", str(package.path), "--soc", "here"]) == 2
    assert "--soc here: this machine has no chip of Qualcomm's; name the chip" in capsys.readouterr().err


def test_compiling_without_the_runtime_says_how_to_get_it(
    package: Package, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = providers.importlib.util.find_spec
    monkeypatch.setattr(
        providers.importlib.util, "find_spec", lambda name: None if name == "onnxruntime_qnn" else found(name)
    )
    assert main(["compile", str(package.path), "--soc", "57"]) == 2
    said = capsys.readouterr().err
    assert "onnxruntime_qnn cannot be found; install it with: " in said
    assert "-m pip install onnx onnxruntime onnxruntime_qnn" in said


# ---- the doctor ---------------------------------------------------------------------------------------------------
SNAPDRAGON = {"soc_id": "557", "machine": "SM8650", "family": "Snapdragon"}


def findings(package: Path, root: Path, version: Callable[[chips.Chip], str] = lambda chip: QNN) -> list[Check]:
    made = npu_checks(package, root, nothing, version)
    assert all(check.advice for check in made if check.state != "ok")
    return made


def test_the_doctor_says_that_all_is_there(package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npu, "require_modules", lambda provider: None)
    made = findings(package.path, machine(tmp_path / "root", **SNAPDRAGON))
    assert [(check.name, check.state) for check in made] == [
        ("neural chip", "ok"),
        ("npu runtime", "ok"),
        ("npu contexts", "ok"),
    ]
    assert made[0].found == "SM8650 (soc 57, Hexagon v75)"
    assert made[2].found == "for SM8650, of 64 neurons"


def test_the_doctor_says_what_is_missing(package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(chip: chips.Chip) -> str:
        raise UserError("backend onnx:qnn: the runtime does not load: libcdsprpc.so: cannot open")

    phone = machine(tmp_path / "root", **SNAPDRAGON)
    monkeypatch.setattr(npu, "require_modules", lambda provider: None)
    _, runtime, contexts = findings(package.path, phone, broken)
    assert (runtime.state, contexts.state) == ("warn", "ok")
    assert "libcdsprpc.so" in runtime.found
    _, runtime, contexts = findings(package.path, phone, lambda chip: "2.41.0-5.52.0")
    assert (runtime.state, contexts.state) == ("ok", "warn")
    assert "'2.41.0-5.52.0' is installed" in contexts.found
    assert f"`neuronpipe compile {package.path} --soc 57`" in contexts.advice
    (folder_of(package.path, CHIP, 64) / INDEX).unlink()
    assert findings(package.path, phone)[2].found == "none for SM8650: each start prepares graphs"
    assert "is not a package" in findings(tmp_path, phone)[2].found


def test_the_doctor_knows_phones_whose_runtime_is_no_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(provider: Provider) -> None:
        raise UserError("onnxruntime_qnn cannot be found; install it with: pip install")

    properties = {"ro.soc.model": "SM8650", "ro.soc.manufacturer": "QTI"}
    monkeypatch.setattr(npu, "require_modules", missing)
    android = npu_checks(tmp_path, tmp_path, lambda name: properties.get(name, ""))
    assert "npu-prefill" in android[1].advice
    board = findings(tmp_path, machine(tmp_path / "root", **SNAPDRAGON))
    assert "onnxruntime_qnn cannot be found" in board[1].found


def test_the_doctor_has_one_line_for_other_machines(tmp_path: Path) -> None:
    (other,) = findings(tmp_path, tmp_path)
    assert (other.name, other.state) == ("neural chip", "ok")
    (unknown,) = findings(tmp_path, machine(tmp_path / "root", **(SNAPDRAGON | {"machine": "X", "soc_id": "9"})))
    assert (unknown.found, unknown.state) == ("X, soc_id 9", "warn")


@pytest.mark.skipif(platform.machine() == "aarch64", reason="it may load")
def test_a_runtime_that_does_not_load_is_a_finding() -> None:
    with pytest.raises(UserError, match=r"^backend onnx:qnn: this machine is no 64-bit Arm"):
        npu.loaded_version(dataclasses.replace(CHIP))
