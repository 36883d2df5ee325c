"""Reading cores, quotas and memory from other machines' /sys and /proc."""

from __future__ import annotations

from pathlib import Path

import pytest
from neuronpipe.plans.device.cores import physical_cores
from neuronpipe.plans.device.process_limits import (
    Memory,
    read_cores,
    read_cpu_quota,
    read_memory,
    read_oom_kills,
    read_processor,
)

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text + "\n")
    return root


def cpu_files(name: str, values: list[int]) -> dict[str, str]:
    return {f"sys/devices/system/cpu/cpu{i}/{name}": str(value) for i, value in enumerate(values)}


def test_capacities_are_taken_where_the_kernel_states_them(tmp_path: Path) -> None:
    root = write(tmp_path, cpu_files("cpu_capacity", [325] * 2 + [830] * 5 + [1024]))
    cores = read_cores(root, range(8))
    assert [core.capacity for core in cores] == [325] * 2 + [830] * 5 + [1024]
    assert all(core.allowed for core in cores)


def test_clocks_stand_in_for_missing_capacities(tmp_path: Path) -> None:
    root = write(tmp_path, cpu_files("cpufreq/cpuinfo_max_freq", [1_800_000, 1_800_000, 3_600_000]))
    assert [(core.capacity, core.kind) for core in read_cores(root, {0, 2})] == [
        *[(512, "little"), (512, "little"), (1024, "big")],
    ]


def test_a_capacity_that_only_some_cores_state_is_not_mixed_with_clocks(tmp_path: Path) -> None:
    files = cpu_files("cpufreq/cpuinfo_max_freq", [2_000_000, 2_000_000])
    root = write(tmp_path, {**files, "sys/devices/system/cpu/cpu0/cpu_capacity": "1024"})
    assert [core.capacity for core in read_cores(root, {0, 1})] == [1024, 1024]


def test_without_any_figures_all_cores_are_alike(tmp_path: Path) -> None:
    assert [(core.id, core.kind) for core in read_cores(tmp_path, {4, 2})] == [(2, "big"), (4, "big")]


def test_folders_that_are_no_cores_are_passed_over(tmp_path: Path) -> None:
    root = write(tmp_path, {**cpu_files("cpu_capacity", [1024]), "sys/devices/system/cpu/cpufreq/boost": "1"})
    assert [core.id for core in read_cores(root, {0})] == [0]


@pytest.mark.parametrize("name", ["core_cpus_list", "thread_siblings_list"])
def test_siblings_of_a_physical_core_are_known(tmp_path: Path, name: str) -> None:
    siblings = ["0,2", "1,3", "0,2", "1,3"]
    folder = "sys/devices/system/cpu/cpu{}/topology/{}"
    root = write(tmp_path, {folder.format(core, name): text for core, text in enumerate(siblings)})
    cores = read_cores(root, range(4))
    assert [core.physical for core in cores] == [0, 1, 0, 1]
    assert physical_cores(cores) == 2
    assert physical_cores(read_cores(root, {0, 2, 3})) == 2
    assert physical_cores(read_cores(tmp_path / "without", range(4))) == 4


def test_a_core_outside_the_affinity_mask_is_known_and_not_allowed(tmp_path: Path) -> None:
    root = write(tmp_path, cpu_files("cpu_capacity", [1024, 1024]))
    assert [core.allowed for core in read_cores(root, {1})] == [False, True]


@pytest.mark.parametrize(
    ("text", "model"),
    [
        ("processor\t: 0\nmodel\t\t: 17\nmodel name\t: Some  CPU\n\nprocessor\t: 1\nmodel name\t: Other", "Some CPU"),
        (
            "processor\t: 0\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x1\nCPU part\t: 0xd4d\n",
            "CPU implementer : 0x41 CPU part : 0xd4d",
        ),
        ("processor\t: 0\nHardware\t: Some Chip\n", "Some Chip"),
        ("nonsense", ""),
    ],
)
def test_the_processors_model_is_the_first_ones(tmp_path: Path, text: str, model: str) -> None:
    assert read_processor(write(tmp_path, {"proc/cpuinfo": text})) == model


MEMINFO = {"proc/meminfo": f"MemTotal: {8 * GIB // 1024} kB\nMemFree: 1 kB\nMemAvailable: {6 * GIB // 1024} kB"}
V2 = {"proc/self/cgroup": "0::/app/run"}
V1 = {"proc/self/cgroup": "4:memory:/app\n3:cpu,cpuacct:/app"}


def test_memory_without_control_groups_is_the_machines(tmp_path: Path) -> None:
    assert read_memory(write(tmp_path, MEMINFO)) == Memory(total_bytes=8 * GIB, available_bytes=6 * GIB)


def test_the_tightest_group_above_us_limits_memory_in_v2(tmp_path: Path) -> None:
    groups = {
        "sys/fs/cgroup/app/memory.max": str(2 * GIB),
        "sys/fs/cgroup/app/memory.current": str(1 * GIB),
        "sys/fs/cgroup/app/memory.stat": f"anon 5\ninactive_file {GIB // 2}",
        "sys/fs/cgroup/app/run/memory.max": "max",
    }
    memory = read_memory(write(tmp_path, {**MEMINFO, **V2, **groups}))
    assert memory == Memory(total_bytes=2 * GIB, available_bytes=GIB + GIB // 2)


def test_a_v1_limit_beyond_all_memory_is_none(tmp_path: Path) -> None:
    groups = {"sys/fs/cgroup/memory/app/memory.limit_in_bytes": "9223372036854771712"}
    assert read_memory(write(tmp_path, {**MEMINFO, **V1, **groups})).total_bytes == 8 * GIB


def test_a_v1_limit_counts_as_the_memory_there_is(tmp_path: Path) -> None:
    groups = {
        "sys/fs/cgroup/memory/app/memory.limit_in_bytes": str(GIB),
        "sys/fs/cgroup/memory/app/memory.usage_in_bytes": str(2 * GIB),
    }
    assert read_memory(write(tmp_path, {**MEMINFO, **V1, **groups})) == Memory(total_bytes=GIB, available_bytes=0)


def test_a_container_that_sees_only_its_own_mount_still_finds_its_limit(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/host/path/to/container", "sys/fs/cgroup/memory.max": str(GIB)}
    assert read_memory(write(tmp_path, {**MEMINFO, **files})).total_bytes == GIB


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({**V2, "sys/fs/cgroup/app/run/cpu.max": "max 100000"}, None),
        ({**V2, "sys/fs/cgroup/app/run/cpu.max": "50000 100000", "sys/fs/cgroup/app/cpu.max": "150000 100000"}, 0.5),
        ({**V1, "sys/fs/cgroup/cpu,cpuacct/app/cpu.cfs_quota_us": "-1"}, None),
        (
            {
                **V1,
                "sys/fs/cgroup/cpu/app/cpu.cfs_quota_us": "250000",
                "sys/fs/cgroup/cpu/app/cpu.cfs_period_us": "100000",
            },
            2.5,
        ),
        ({"proc/self/cgroup": "nonsense"}, None),
    ],
)
def test_the_quota_is_in_cores(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert read_cpu_quota(write(tmp_path, files)) == quota


@pytest.mark.parametrize(("text", "kills"), [("pgfault 7\noom_kill 3\nx_oom_kill 9\n", 3), ("pgfault 7\n", 0), ("", 0)])
def test_processes_that_the_kernel_killed_for_want_of_memory_are_counted(tmp_path: Path, text: str, kills: int) -> None:
    assert read_oom_kills(write(tmp_path, {"proc/vmstat": text})) == kills
