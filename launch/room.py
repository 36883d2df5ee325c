"""Whether the memory there is holds what a plan takes: the machine's, or the control group's where that is less."""

from __future__ import annotations

from neuronpipe.launch.sizes import show_bytes
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.plan.account import MIB
from neuronpipe.plans.plan.plan import Plan
from neuronpipe.protocol.errors import UserError


def room_warning(plan: Plan, device: Device) -> str | None:
    """What a person should know before the run begins: that other programs have memory that it wants.

    Raises UserError for a plan that takes more than there is at all: the kernel would end the run in the middle of a
    text. A limit may be beyond that; what counts is what the plan makes of it.
    """
    takes, there_is, available = plan.memory.total_bytes(), device.memory_total_bytes, device.memory_available_bytes
    if there_is == 0:
        return None  # not known here
    if takes > there_is:
        raise UserError(
            f"the plan takes {show_bytes(takes)}, and all memory of this machine, or of the control group, is "
            f"{show_bytes(there_is)}: {_advice(plan, device)}"
        )
    if takes > available:
        return (
            f"the plan takes {show_bytes(takes)}, and {show_bytes(available)} of {show_bytes(there_is)} are available "
            f"now: close other programs, or {_advice(plan, device)}"
        )
    return None


def _advice(plan: Plan, device: Device) -> str:
    least, fits_mib = plan.memory.least_bytes, device.memory_available_bytes // MIB
    if least > fits_mib * MIB:
        return f"take a smaller --context or another package; this one needs {show_bytes(least)} at least"
    return f"ask for less, or make the plan for less: --memory {fits_mib}MiB is what fits now"
