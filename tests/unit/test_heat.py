"""Temperatures from other devices' /sys, and how much a run shares for them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from neuronpipe.launch.verbs.runs.throttle import MAX_SHARE, Throttling, render
from neuronpipe.plans.device.thermal import Sensor, ThermalState, read_thermal_state


def zone(root: Path, number: int, name: str, temperature: int, trips: dict[str, int] | None = None) -> None:
    place = root / f"sys/class/thermal/thermal_zone{number}"
    place.mkdir(parents=True)
    (place / "type").write_text(name + "\n")
    (place / "temp").write_text(f"{temperature}\n")
    for index, (kind, celsius) in enumerate((trips or {}).items()):
        (place / f"trip_point_{index}_type").write_text(kind + "\n")
        (place / f"trip_point_{index}_temp").write_text(f"{celsius}\n")


def clocks(root: Path, allowed_khz: list[int], most_khz: list[int]) -> None:
    for core, (allowed, most) in enumerate(zip(allowed_khz, most_khz, strict=True)):
        place = root / f"sys/devices/system/cpu/cpu{core}/cpufreq"
        place.mkdir(parents=True)
        (place / "scaling_max_freq").write_text(f"{allowed}\n")
        (place / "cpuinfo_max_freq").write_text(f"{most}\n")


def names(heat: ThermalState) -> list[str]:
    return [sensor.name for sensor in heat.sensors]


def test_only_zones_of_processor_skin_and_battery_count_and_the_nearest_to_its_limit_comes_first(
    tmp_path: Path,
) -> None:
    zone(tmp_path, 0, "pm8550_tz", 88000)
    zone(tmp_path, 1, "cpu-1-2-0", 71000)
    zone(tmp_path, 2, "skin-msm-therm", 41500)
    zone(tmp_path, 10, "modem-ambient", 120000)
    heat = read_thermal_state(tmp_path)
    assert names(heat) == ["skin-msm-therm", "cpu-1-2-0"]
    assert (heat.sensors[0].celsius, heat.sensors[1].celsius) == (41.5, 71.0)
    assert heat.state == "warm"


def test_a_warm_processor_counts_beside_a_cool_skin_that_is_nearer_to_its_limit() -> None:
    skin = Sensor(name="skin", kind="skin", celsius=40.0, limit_celsius=43.0)
    processor = Sensor(name="cpu", kind="processor", celsius=81.0, limit_celsius=85.0)
    assert ThermalState(sensors=(skin,), clock_share=None).state == "cool"
    assert ThermalState(sensors=(skin, processor), clock_share=None).state == "warm"


@pytest.mark.parametrize("temperature", [0, -40000, 2147483647, -273000])
def test_a_sensor_that_is_switched_off_is_no_temperature(tmp_path: Path, temperature: int) -> None:
    zone(tmp_path, 0, "cpu-0-0", temperature)
    assert read_thermal_state(tmp_path).state == "unknown"


def test_degrees_and_thousandths_are_told_apart(tmp_path: Path) -> None:
    zone(tmp_path, 0, "cpu-thermal", 64)
    zone(tmp_path, 1, "cpuss-0", 63500)
    assert [sensor.celsius for sensor in read_thermal_state(tmp_path).sensors] == [64.0, 63.5]


def test_the_charge_in_per_cent_that_some_phones_call_soc_is_no_temperature(tmp_path: Path) -> None:
    zone(tmp_path, 0, "soc", 97)
    zone(tmp_path, 1, "socd", 97)
    assert read_thermal_state(tmp_path).state == "unknown"


def test_the_kernels_own_trip_point_is_the_limit_of_a_zone_unless_it_steers_something_else(tmp_path: Path) -> None:
    zone(tmp_path, 0, "cpu-0-0", 79000, {"active": 50000, "passive": 78000, "critical": 110000})
    zone(tmp_path, 1, "cpu-0-1", 60000, {"passive": 45000})
    zone(tmp_path, 2, "cpu-0-2", 60000, {"passive": 115000})
    limits = {sensor.name: sensor.limit_celsius for sensor in read_thermal_state(tmp_path).sensors}
    assert limits == {"cpu-0-0": 78.0, "cpu-0-1": 90.0, "cpu-0-2": 90.0}
    assert read_thermal_state(tmp_path).state == "hot"


def test_the_battery_is_read_from_the_kernel_or_from_termux(tmp_path: Path) -> None:
    said = json.dumps({"health": "GOOD", "plugged": "UNPLUGGED", "temperature": 36.4})
    assert read_thermal_state(tmp_path, said).sensors[0].celsius == 36.4
    assert read_thermal_state(tmp_path, said.replace("36.4", '"44.5"')).state == "hot"  # some phones answer with a text
    place = tmp_path / "sys/class/power_supply/battery"
    place.mkdir(parents=True)
    (place / "temp").write_text("401\n")
    assert read_thermal_state(tmp_path, said).sensors[0].celsius == 40.1


@pytest.mark.parametrize("said", ["", "Termux:API is not yet available", "{}", "[]", '{"temperature": null}'])
def test_a_battery_that_does_not_answer_is_left_out(tmp_path: Path, said: str) -> None:
    assert read_thermal_state(tmp_path, said) == ThermalState(sensors=(), clock_share=None)


def test_lowered_clocks_are_noticed_over_all_cores(tmp_path: Path) -> None:
    clocks(tmp_path, [1_800_000, 1_500_000, 1_650_000], [1_800_000, 3_000_000, 3_300_000])
    heat = read_thermal_state(tmp_path)
    assert heat.clock_share == pytest.approx(4.95 / 8.1)
    assert heat.throttled
    assert "lowered the clocks to 61%" in render(heat, 0.0)


def test_full_clocks_are_not_throttled(tmp_path: Path) -> None:
    clocks(tmp_path, [1_800_000, 3_000_000], [1_800_000, 3_000_000])
    assert not read_thermal_state(tmp_path).throttled


def at(celsius: float) -> ThermalState:
    return ThermalState(
        sensors=(Sensor(name="cpu", kind="processor", celsius=celsius, limit_celsius=90.0),), clock_share=None
    )


def test_rest_grows_while_it_is_hot_stays_while_it_is_warm_and_goes_when_it_is_cool() -> None:
    throttling = Throttling()
    assert throttling.update(at(60)) == 0
    shares = [throttling.update(at(91)) for _ in range(9)]
    assert shares == sorted(shares)
    assert shares[0] > 0
    assert shares[-1] == MAX_SHARE
    assert throttling.update(at(85)) == MAX_SHARE
    shares = [throttling.update(at(70)) for _ in range(40)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == 0


def test_rest_ends_when_the_sensors_fall_silent() -> None:
    throttling = Throttling()
    throttling.update(at(95))
    assert [throttling.update(ThermalState(sensors=(), clock_share=None)) for _ in range(5)][-1] == 0


def test_a_person_is_told_what_to_do() -> None:
    assert "Termux:API" in render(ThermalState(sensors=(), clock_share=None), 0.0)
    assert "let it cool" in render(at(95), 0.0)
    assert render(at(95), 0.3).endswith("throttled: pauses for 30% of the time")
