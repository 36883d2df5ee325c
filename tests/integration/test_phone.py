"""launch/phone.sh in a Termux that is made up: stand-ins for its commands, and another device's proc and sys.

The environment is a stand-in too, as in test_bootstrap.py, so that nothing is installed; the last test puts the real
command into it.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline import PATIENCE_S, Run, Shell, eventually

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("sh", "awk", "cat", "chmod", "cp", "date", "df", "find", "id", "ln", "ls", "mkdir", "mv", "rm", "sed", "sort")
TOOLS += ("sleep", "tail", "touch", "tr", "uniq", "wc")
CAPACITIES = (325, 325, 830, 830, 830, 830, 830, 1024)
AVAILABLE_MIB = 6000


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{shutil.which('sh')}\n{text}\n")
    path.chmod(0o755)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


class Phone:
    """A phone's files, Termux's commands, and a log of what was asked of them."""

    def __init__(self, folder: Path) -> None:
        self.device, self.bin, self.log = folder / "device", folder / "usr/bin", folder / "log"
        self.log.touch()
        self.has_memory(AVAILABLE_MIB)
        write(self.device / "proc/self/status", "Name:\tsh\nCpus_allowed_list:\t0-7\n")
        for core, capacity in enumerate(CAPACITIES):
            write(self.device / f"sys/devices/system/cpu/cpu{core}/cpu_capacity", f"{capacity}\n")
        write(self.device / "sys/class/thermal/thermal_zone0/type", "cpu-0-0\n")
        write(self.device / "sys/class/thermal/thermal_zone0/temp", "41000\n")
        self.bin.mkdir(parents=True)
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or pytest.skip(f"{tool} is not here"))
        script(self.bin / "python3", f'exec "{sys.executable}" "$@"')
        for name in ("cc", "cmake", "ninja"):
            script(self.bin / name, "exit 0")
        for name in ("termux-wake-lock", "termux-wake-unlock"):
            script(self.bin / name, f'echo {name} >>"{self.log}"')
        self.says("uname", {"-m": "aarch64", "-r": "6.1.75-android14"})
        self.is_android(34)
        self.environment = {
            "PATH": str(self.bin),
            "PREFIX": str(folder / "usr"),
            "TERMUX_VERSION": "0.118.1",
            "NEURONPIPE_DEVICE": str(self.device),
        }

    def has_memory(self, available_mib: int) -> None:
        text = f"MemTotal: {12 << 20} kB\nMemFree: 1 kB\nMemAvailable: {available_mib << 10} kB\n"
        write(self.device / "proc/meminfo", text)

    def says(self, name: str, answers: dict[str, str]) -> None:
        cases = "\n".join(f"'{word}') echo '{answer}' ;;" for word, answer in answers.items())
        script(self.bin / name, f'case "$1" in\n{cases}\nesac')

    def is_android(self, sdk: int, **properties: str) -> None:
        self.says("getprop", {"ro.build.version.sdk": str(sdk), "ro.product.model": "P1", **properties})

    def asked(self) -> list[str]:
        return self.log.read_text().split("\n")[:-1]


class Checkout:
    """The scripts in a folder of their own, with an environment that writes down what it is started with."""

    def __init__(self, folder: Path, phone: Phone) -> None:
        self.root, self.phone = folder / "home/np", phone
        for name in ("phone.sh", "bootstrap.sh"):
            (self.root / "launch").mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / "launch" / name, self.root / "launch" / name)
        write(self.root / "native/_kernels.abi3.so", "")
        write(self.root / "pyproject.toml", "")
        script(self.root / ".venv/bin/python", f'case "$*" in *--editable*) echo installed >>"{phone.log}" ;; esac')
        script(self.root / ".venv/bin/neuronpipe", f'echo "neuronpipe $*" >>"{phone.log}"')

    def run(self, *words: str) -> tuple[int, str]:
        """(exit code, everything said)"""
        command = [self.root / "launch/phone.sh", *words]
        ran = subprocess.run(
            command,
            env={**self.phone.environment, "HOME": str(self.root.parent), "TMPDIR": str(self.root.parent)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        return ran.returncode, ran.stdout


@pytest.fixture
def phone(tmp_path: Path) -> Phone:
    return Phone(tmp_path)


@pytest.fixture
def checkout(tmp_path: Path, phone: Phone) -> Checkout:
    return Checkout(tmp_path, phone)


def line(said: str, name: str) -> str:
    """What was found of `name`, and the advice below it."""
    lines = said.splitlines()
    place = next(number for number, text in enumerate(lines) if text[6:].startswith(name))
    advice = itertools.takewhile(lambda text: text.startswith(" " * 21), lines[place + 1 :])
    return "\n".join([lines[place], *advice])


def test_a_check_says_what_the_phone_is_and_installs_nothing(checkout: Checkout, phone: Phone) -> None:
    code, said = checkout.run("--check")
    assert code == 0
    assert line(said, "termux").startswith("ok")
    assert "6000 of 12288 MiB" in line(said, "memory")
    assert "8: 2 of 325, 5 of 830, 1 of 1024" in line(said, "cores")
    assert line(said, "temperature").startswith("ok")
    assert "not for apps" in line(said, "io_uring")
    assert phone.asked() == []


def test_what_stands_in_the_way_fails_and_is_not_started(checkout: Checkout, phone: Phone) -> None:
    phone.has_memory(200)
    phone.says("uname", {"-m": "armv8l", "-r": "4.9"})
    code, said = checkout.run("--check")
    assert code == 1
    assert line(said, "memory").startswith("FAIL")
    assert line(said, "architecture").startswith("FAIL")
    assert "close other apps" in said
    assert checkout.run()[0] == 2
    assert phone.asked() == []


def test_shared_storage_that_runs_no_programs_is_named(checkout: Checkout, phone: Phone) -> None:
    (phone.bin / "ln").unlink()
    script(phone.bin / "ln", "exit 1")
    code, said = checkout.run("--check")
    assert code == 1
    assert "clone into Termux's home" in line(said, "place")
    assert not list(checkout.root.glob(".phone-trial*"))


@pytest.mark.parametrize(
    ("sdk", "switch", "state", "advice"),
    [
        (30, "", "ok", "does not count"),
        (31, "", "warn", "max_phantom_processes"),
        (34, "", "warn", "settings_enable_monitor_phantom_procs false"),
        (34, "false", "ok", "not limited"),
    ],
)
def test_androids_limit_on_processes_comes_with_the_command_that_lifts_it(
    checkout: Checkout, phone: Phone, sdk: int, switch: str, state: str, advice: str
) -> None:
    phone.is_android(sdk, **{"persist.sys.fflag.override.settings_enable_monitor_phantom_procs": switch})
    code, said = checkout.run("--check")
    assert code == 0
    assert line(said, "processes").startswith(state)
    assert advice in line(said, "processes")


def test_an_app_in_the_background_is_told_that_it_has_slow_cores_only(checkout: Checkout, phone: Phone) -> None:
    write(phone.device / "proc/self/status", "Cpus_allowed_list:\t0-1,3\n")
    assert line(checkout.run("--check")[1], "cores").startswith("warn")


def test_a_phone_whose_sensors_are_closed_is_told_of_termux_api(checkout: Checkout, phone: Phone) -> None:
    shutil.rmtree(phone.device / "sys/class")
    assert "pkg install termux-api" in line(checkout.run("--check")[1], "temperature")
    script(phone.bin / "termux-battery-status", "echo '{}'")
    assert line(checkout.run("--check")[1], "temperature").startswith("ok")


def test_the_first_start_installs_with_pkg_and_later_ones_do_not(checkout: Checkout, phone: Phone) -> None:
    compiler = phone.bin / "cmake"
    compiler.rename(phone.bin / "kept")
    script(phone.bin / "pkg", f'echo "pkg $*" >>"{phone.log}"; cp "{phone.bin}/kept" "{compiler}"')
    assert "missing: packages" in checkout.run("--check")[1]
    assert phone.asked() == []
    code, said = checkout.run()
    assert code == 0, said
    asked = phone.asked()
    assert asked[0] == "pkg install -y tur-repo"
    assert asked[1].startswith("pkg install -y python ")
    assert asked[2] == "installed"
    phone.log.write_text("")
    assert checkout.run()[0] == 0
    assert not [word for word in phone.asked() if word.startswith(("pkg", "installed"))]


def test_a_run_is_started_awake_watched_and_ended(checkout: Checkout, phone: Phone) -> None:
    assert checkout.run("some package", "--workers", "2")[0] == 0
    asked = [text for text in phone.asked() if text != "installed"]
    run = asked[1].split()[-1]
    assert asked == [
        "termux-wake-lock",
        f"neuronpipe up some package --workers 2 --memory {AVAILABLE_MIB // 2}MiB --run {run}",
        f"neuronpipe throttle --run {run} --sensors {phone.device}",
        f"neuronpipe down --run {run}",
        "termux-wake-unlock",
    ]


def test_a_limit_and_a_place_that_were_named_stand(checkout: Checkout, phone: Phone) -> None:
    assert checkout.run("--memory", "1GiB", "--run", "/x/y")[0] == 0
    assert "neuronpipe up --memory 1GiB --run /x/y" in phone.asked()
    assert "neuronpipe down --run /x/y" in phone.asked()


def test_one_text_keeps_the_phone_awake_for_as_long_as_it_takes(checkout: Checkout, phone: Phone) -> None:
    assert checkout.run("run", "-p", "two words")[0] == 0
    assert [text for text in phone.asked() if text != "installed"] == [
        "termux-wake-lock",
        f"neuronpipe run -p two words --memory {AVAILABLE_MIB // 2}MiB",
        "termux-wake-unlock",
    ]


def test_ctrl_c_lets_the_phone_sleep_again(checkout: Checkout, phone: Phone) -> None:
    script(checkout.root / ".venv/bin/neuronpipe", f'echo started >>"{phone.log}"; exec sleep 60')
    command = [checkout.root / "launch/phone.sh", "run", "-p", "x"]
    environment = {**phone.environment, "HOME": str(checkout.root), "TMPDIR": str(checkout.root)}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        assert eventually(lambda: "started" in phone.asked())
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to everybody in it
        assert process.wait(PATIENCE_S) == 130
    finally:
        process.kill()
    assert phone.asked()[-1] == "termux-wake-unlock"


@pytest.mark.parametrize(("verb", "number"), [((), signal.SIGINT), (("serve", "--port", "0"), signal.SIGTERM)])
def test_a_real_run_rests_when_the_phone_is_hot_and_ends_with_the_script(
    shell: Shell, checkout: Checkout, phone: Phone, verb: tuple[str, ...], number: signal.Signals
) -> None:
    script(checkout.root / ".venv/bin/neuronpipe", f'exec "{sys.executable}" -m neuronpipe.launch "$@"')
    write(phone.device / "sys/class/thermal/thermal_zone0/temp", "99000\n")
    place = shell.folder / "neuronpipe-p"
    process = shell.start(
        *verb,
        "--run",
        place,
        "--context",
        "64",
        program=[checkout.root / "launch/phone.sh"],
        environment=phone.environment,
    )
    try:
        run = Run(shell, place)
        assert eventually((place / "run.json").exists, within_s=30), process.communicate(timeout=1)
        assert eventually(lambda: run.status().throttle_share > 0, within_s=20)
        assert run.status().memory_limit_bytes == AVAILABLE_MIB // 2 << 20
        assert run.ask("def f(", max_tokens=4)["tokens"] == 4
    finally:
        process.send_signal(number)
        said, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + number
    assert "hot: cpu-0-0 99 of 90 C" in said
    assert [word for word in phone.asked() if word != "installed"] == ["termux-wake-lock", "termux-wake-unlock"]
