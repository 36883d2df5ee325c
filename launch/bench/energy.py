"""Energy use, from counters of the processor, or from the battery while the machine runs on it."""

from __future__ import annotations

import time
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")
POWER_SUPPLY = Path("/sys/class/power_supply")


class EnergyMeter:
    """Measures the energy of the whole machine since its creation."""

    def __init__(self, powercap: Path = POWERCAP, power_supply: Path = POWER_SUPPLY) -> None:
        # intel-rapl:0 is a package; intel-rapl:0:1 is a part of it and would count twice.
        self._zones = [zone for zone in sorted(powercap.glob("*:*")) if zone.name.count(":") == 1]
        self._batteries = sorted(power_supply.glob("BAT*")) + sorted(power_supply.glob("battery"))
        self._zone_uj = {zone: _read(zone / "energy_uj") for zone in self._zones}
        self._began = time.monotonic()
        self._watts = self._battery_watts()

    def joules(self) -> float | None:
        """Return the energy used so far; None if there is no counter.

        From a battery it is estimated: the mean of its power at the start and now, times the time.
        """
        total_uj, has_counter = 0, False
        for zone, before in self._zone_uj.items():
            after = _read(zone / "energy_uj")
            if before is not None and after is not None:
                has_counter = True
                wrap = _read(zone / "max_energy_range_uj") or 0
                total_uj += after - before if after >= before else after - before + wrap
        if has_counter:
            return total_uj / 1e6
        watts = self._battery_watts()
        if watts is None or self._watts is None:
            return None
        return (watts + self._watts) / 2 * (time.monotonic() - self._began)

    def _battery_watts(self) -> float | None:
        for battery in self._batteries:
            try:
                if (battery / "status").read_text().strip() != "Discharging":
                    continue
            except OSError:
                continue
            microwatts = _read(battery / "power_now")
            if microwatts is not None:
                return abs(microwatts) / 1e6
            microamperes, microvolts = _read(battery / "current_now"), _read(battery / "voltage_now")
            if microamperes is not None and microvolts is not None:
                return abs(microamperes) * microvolts / 1e12
        return None


def _read(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None  # it does not exist, or only root may read it
