"""Compare a plan with the memory of this machine.

The command does this, not the planner: a plan states what a package needs, and what other programs leave over changes
from start to start.
"""

from __future__ import annotations

from neuronpipe.launch.formats import show_bytes, show_min_bytes
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.plan.document import Plan
from neuronpipe.plans.plan.memory_budget import MIB
from neuronpipe.protocol.errors import UserError


def memory_warning(plan: Plan, device: Device, min_limit_bytes: int) -> str | None:
    """Return a warning if the plan takes more memory than is available now, unless its run follows what is available.

    min_limit_bytes: the smallest limit for which there is a plan

    Raises UserError for a plan that takes more than the machine has: the kernel would kill the run. The plan's total
    counts, not its limit: a generous limit for a small model is no mistake.
    """
    needed_bytes = plan.memory.total_bytes()
    total_bytes, available_bytes = device.memory_total_bytes, device.memory_available_bytes
    if total_bytes == 0:
        return None  # not known on this machine
    if needed_bytes > total_bytes:
        raise UserError(
            f"the plan takes {show_bytes(needed_bytes)}, and all memory of this machine, or of the control group, is "
            f"{show_bytes(total_bytes)}: {_advice(device, min_limit_bytes)}"
        )
    if needed_bytes > available_bytes and not plan.memory.follows:
        return (
            f"the plan takes {show_bytes(needed_bytes)}, and {show_bytes(available_bytes)} of "
            f"{show_bytes(total_bytes)} are available now: close other programs, or {_advice(device, min_limit_bytes)}"
        )
    return None


def _advice(device: Device, min_limit_bytes: int) -> str:
    available_mib = device.memory_available_bytes // MIB
    if min_limit_bytes > available_mib * MIB:
        return f"take a smaller --context or another package; this one needs {show_min_bytes(min_limit_bytes)} at least"
    return f"ask for less, or make the plan for less: --memory {available_mib}MiB is what fits now"
