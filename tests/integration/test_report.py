"""`report` on the demo model: one command measures, and nothing in its output says who ran it or where."""

from __future__ import annotations

import getpass
import json
import os
import re
import shutil
import socket
from pathlib import Path

from neuronpipe.launch.planning import DEMO
from neuronpipe.launch.report.document import read_report

from tests.pipeline import Shell

SECRET = "zebulon"  # stands for a person: in the home, the user's name, the host's, and the folders of the package
MACHINE_IDS = (Path("/etc/machine-id"), Path("/proc/sys/kernel/random/boot_id"))


def test_a_report_has_the_figures_of_a_run_and_nothing_private(shell: Shell, tmp_path: Path) -> None:
    home = tmp_path / SECRET
    package = home / f"{SECRET}-private" / "bamboo"
    shutil.copytree(DEMO, package)
    environment = {
        "HOME": str(home), "USER": SECRET, "LOGNAME": SECRET, "HOSTNAME": f"{SECRET}-laptop", "XDG_CACHE_HOME": "",
    }  # fmt: skip
    file = tmp_path / "bamboo.json"
    words = ("report", package, "--ffn-resident", "50%", "--context", "64", "--name", "a phone")
    done = shell.call(*words, "--json", "-o", file, environment=environment)
    assert done.code == 0, done.errors
    report = read_report(file)
    assert (report.model.name, report.device.name) == ("bamboo", "a phone")
    assert [test.name for test in report.tests] == ["pp64", "tg59"]
    assert 0.3 < report.plan.resident_share <= 0.5
    assert report.plan.context_tokens == 64
    prompt, decode = report.tests
    assert (prompt.measured.flash_bytes_per_token or 0) > 0
    assert 0 < (decode.measured.miss_rate or 0) <= 1
    assert 0 < (decode.measured.peak_memory_bytes or 0) <= report.plan.limit_bytes
    assert decode.planned.peak_memory_bytes
    assert 0 < (decode.p50_ms or 0) <= (decode.p99_ms or 0) <= (decode.longest_ms or 0)

    printed = shell.call(*words, environment=environment)
    assert printed.code == 0, printed.errors
    assert "| model | bamboo, " in printed.out
    assert "| measured | pp64 | tg59 |" in printed.out
    private = {str(home), str(tmp_path), socket.gethostname(), os.uname().nodename, str(shell.folder)}
    private |= {getpass.getuser()} - {"root"}  # which names nobody
    private |= {name.read_text().strip() for name in MACHINE_IDS if name.is_file()} - {""}
    for text in (printed.out, json.dumps(json.loads(file.read_text()), ensure_ascii=False)):
        assert SECRET not in text
        assert [word for word in private if re.search(rf"(?<!\w){re.escape(word)}(?!\w)", text)] == []
        assert not re.search(r"\b\d{1,3}(\.\d{1,3}){3}\b|\b[0-9a-f]{2}(:[0-9a-f]{2}){5}\b", text), "an address"


def test_what_would_fail_after_the_measurement_is_refused_before_it(shell: Shell, tmp_path: Path) -> None:
    assert "--name: at most 64 printable characters" in shell.refused("report", DEMO, "--name", "x" * 65)
    file = tmp_path / "nowhere" / "r.json"
    assert f"--output {file}: there is no folder" in shell.refused("report", DEMO, "-o", file)
