"""From a command line's wishes to the best plan: the search, with an accelerator or without.

Who asks for an accelerator gets it. Otherwise one is used that a device profile has measured, where the plan with it is
expected to be clearly faster.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from typing import TYPE_CHECKING

from neuronpipe.launch.formats import AUTO, parse_bytes, show_cores
from neuronpipe.plans.cost.access_frequency import AccessFrequencies
from neuronpipe.plans.device.cores import default_decode_workers, max_decode_workers, restrict_cores
from neuronpipe.plans.device.device import Device
from neuronpipe.plans.device.profile import DeviceProfile
from neuronpipe.plans.number_format import show_number
from neuronpipe.plans.package.manifest import Manifest
from neuronpipe.plans.plan.document import ACCELERATOR, Mode, Plan
from neuronpipe.plans.plan.offloaded_blocks import Accelerator
from neuronpipe.plans.planner.candidates import ANSWER, USUAL, SearchResult, Space
from neuronpipe.plans.planner.device_facts import DeviceFacts, device_facts
from neuronpipe.plans.planner.mode_choice import allowed_modes
from neuronpipe.plans.planner.plan_options import PlanOptions
from neuronpipe.plans.planner.search import MIN_GAIN, PRECISION, PROMPT_ALLOWANCE, Search
from neuronpipe.plans.planner.sequence_count import plan_for_sequences
from neuronpipe.protocol.errors import UserError
from neuronpipe.protocol.frozen import frozen

FOLLOWED_LIMIT = 0.9  # of all memory, for a run that follows what is available

if TYPE_CHECKING:
    from neuronpipe.launch.planning import Subject


@frozen
class _Result:
    """What a search came to, and what it says of the accelerator."""

    search: Search
    found: SearchResult
    said: tuple[str, ...] = ()

    @property
    def ms(self) -> float:
        return self.search.ms(self.found.chosen)

    @property
    def speed(self) -> str:
        speed = self.found.chosen.tokens_per_s
        return "no speed" if speed is None else f"{show_number(speed)} tokens/s"


def searched(
    arguments: argparse.Namespace, subject: Subject, *, several: bool, gateway: bool
) -> tuple[Search, SearchResult, Plan]:
    """The search, what it found, and the plan. several: room for further texts is made, where the arguments do not say
    for how many, and no speed is asked for: each takes memory."""
    wanted = PlanOptions(
        ffn_resident_share=arguments.ffn_resident,
        context_tokens=arguments.context,
        sequences=1 if arguments.sequences is None else arguments.sequences,
        without=arguments.without,
        baseline=arguments.baseline,
        hints=arguments.hints,
        follows=arguments.memory == AUTO,
    )
    if not 1 <= wanted.sequences <= 64:
        raise UserError(f"--sequences {wanted.sequences}: between 1 and 64")
    frequencies = AccessFrequencies.of(subject.manifest, subject.read_activity)
    result = _Searching(arguments, subject, gateway, wanted, frequencies).result()
    chosen, made, target = result.found.chosen, result.found.chosen.plan, arguments.target_speed
    if several and arguments.sequences is None and target is None:
        anew = dataclasses.replace(chosen.options, offloaded_blocks=None, offloaded_matrices=None)
        made = plan_for_sequences(subject.manifest, chosen.device, anew, frequencies)
    said = [*result.found.reasons(), *result.said, *filter(None, [subject.prompts.reason])]
    if target is not None:
        said.append(
            f"the limit is the smallest that is expected to reach {target:g} tokens/s, to within {PRECISION:.0%}, and "
            f"{PROMPT_ALLOWANCE:.0%} for prompts"
        )
    return result.search, result.found, dataclasses.replace(made, reasons=(*made.reasons, *said))


@frozen
class _Searching:
    arguments: argparse.Namespace
    subject: Subject
    gateway: bool
    wanted: PlanOptions
    frequencies: AccessFrequencies | None

    def result(self) -> _Result:
        asked, limit_bytes = dict(self.arguments.backend).get(ACCELERATOR), self.arguments.gpu_memory
        measured = self._measured()
        if asked is not None or measured is None:
            return self._of(asked_accelerator(asked, limit_bytes, self.subject.manifest), asked)
        return self._compared(*measured)

    def _measured(self) -> tuple[Accelerator, str] | None:
        """The accelerator that may be used unasked, and its backend."""
        if self.wanted.baseline is not None or "pipeline" in self.wanted.without or self.arguments.target_speed:
            return None
        return measured_accelerator(self.subject.device.profile, self.arguments.gpu_memory, self.subject.manifest)

    def _compared(self, accelerator: Accelerator, backend: str) -> _Result:
        """With it where that is clearly faster and it is still there, else without."""
        alone = self._of(None, None)
        try:
            beside = self._of(accelerator, backend)
        except UserError as error:  # its memory, or the run's with its driver, is too small
            return dataclasses.replace(alone, said=(f"{accelerator.name} is not used: {error}",))
        both = f"{beside.speed} expected with it, {alone.speed} without"
        if not math.isfinite(beside.ms) or (1 + MIN_GAIN) * beside.ms >= alone.ms:
            said = f"{accelerator.name} is not used: {both}; --backend {ACCELERATOR}={backend} uses it all the same"
            return dataclasses.replace(alone, said=(said,))
        if (gone := still_there(accelerator, backend)) is not None:
            return dataclasses.replace(alone, said=(f"{accelerator.name} is not used: {gone}",))
        return dataclasses.replace(beside, said=(f"{accelerator.name} is used: {both}",))

    def _of(self, accelerator: Accelerator | None, backend: str | None) -> _Result:
        target, memory_bytes = self.arguments.target_speed, self.arguments.memory
        if self.wanted.follows:
            memory_bytes = int(FOLLOWED_LIMIT * self.subject.device.memory_total_bytes)
        space = self._space(accelerator, backend)
        search = Search(
            self.subject.manifest, space, self.wanted, USUAL if target is None else ANSWER, self.frequencies
        )
        if target is None:
            return _Result(search, search.within(memory_bytes))
        most_bytes = space.place(space.workers[0]).memory_bytes
        return _Result(search, search.reaching(target, most_bytes if memory_bytes is None else memory_bytes))

    def _space(self, accelerator: Accelerator | None, backend: str | None) -> Space:
        """What may be chosen: all that the arguments leave open."""
        arguments, device, gateway = self.arguments, self.subject.device, self.gateway
        if arguments.workers is not None and not 1 <= arguments.workers <= 64:
            raise UserError(f"--workers {arguments.workers}: between 1 and 64")
        cores = device.cores
        if arguments.cores is not None:
            cores = restrict_cores(device.cores, _allowed(arguments.cores, device))
        prompts = self.subject.prompts.backend
        backends = ({} if prompts is None else {"prefill": prompts}) | dict(arguments.backend)
        quota = device.cpu_quota
        if backend is not None:
            backends[ACCELERATOR] = backend
        if arguments.baseline is not None:
            modes: tuple[Mode, ...] = ("predicted",)
        elif arguments.mode is not None:
            modes = (arguments.mode,)
        else:
            modes = allowed_modes(self.subject.manifest, arguments.quality or "exact")
        if arguments.workers is not None:
            workers: tuple[int, ...] = (arguments.workers,)
        else:
            usual = default_decode_workers(cores, quota)
            others = range(1, max_decode_workers(cores, quota) + 1) if arguments.baseline is None else ()
            workers = tuple(dict.fromkeys((usual, *others)))

        def more(count: int) -> DeviceFacts | None:
            if count > max_decode_workers(device.cores, quota):
                return None
            return device_facts(device, count, gateway=gateway, backends=backends, accelerator=accelerator)

        return Space(
            modes=modes,
            workers=workers,
            place=lambda count: device_facts(
                device, count, gateway=gateway, backends=backends, cores=cores, accelerator=accelerator
            ),
            more=more,
        )


def _allowed(cores: tuple[int, ...], device: Device) -> tuple[int, ...]:
    """The cores that were asked for. Raises UserError for one that is not there, or not for this process."""
    allowed = [core.id for core in device.cores if core.allowed]
    if (missing := next((core for core in cores if core not in allowed), None)) is not None:
        raise UserError(f"--cores: core {missing} is none that this process may use; these are {show_cores(allowed)}")
    return cores


# ---- accelerators ----------------------------------------------------------------------------------------------------
def add_gpu_memory_argument(group: argparse._ArgumentGroup) -> None:
    """`--gpu-memory BYTES`."""
    group.add_argument(
        "--gpu-memory",
        type=parse_bytes,
        metavar="BYTES",
        help="what the accelerator may take of its device's memory (default: nearly all; of memory that the device "
        "shares, a quarter of --memory)",
    )


def asked_accelerator(backend: str | None, memory_bytes: int | None, manifest: Manifest) -> Accelerator | None:
    """The device of this backend; None where none was asked for. Raises UserError where there is no such device, or
    where it cannot compute this model."""
    if backend is None:
        if memory_bytes is not None:
            raise UserError(
                f"--gpu-memory is an accelerator's, and none is asked for or measured; ask for one with --backend "
                f"{ACCELERATOR}=opencl, or measure it with `neuronpipe profile device`"
            )
        return None
    from neuronpipe.services.offload.offload_backend import HolderBackend
    from neuronpipe.services.steps.backend import create_backend, require

    made = create_backend(backend, "accelerator")
    require(made, manifest, "accelerator", f"--backend {ACCELERATOR}={backend}")
    assert isinstance(made, HolderBackend)
    return dataclasses.replace(made.describe(), limit_bytes=memory_bytes)


def measured_accelerator(
    profile: DeviceProfile | None, memory_bytes: int | None, manifest: Manifest
) -> tuple[Accelerator, str] | None:
    """The device that a profile has measured, and its backend; None where there is none, or it cannot compute this
    model. Asks no driver."""
    measured = profile.accelerator if profile is not None else None
    if measured is None:
        return None
    from neuronpipe.services.steps.backend import create_backend

    if create_backend(measured.backend, "accelerator").supports(manifest, "accelerator") is not None:
        return None
    device = Accelerator(
        name=measured.name,
        memory_bytes=measured.memory_bytes,
        max_buffer_bytes=measured.max_buffer_bytes,
        shares_memory=measured.shares_memory,
        is_processor=measured.is_processor,
        limit_bytes=memory_bytes,
    )
    return device, measured.backend


def still_there(accelerator: Accelerator, backend: str) -> str | None:
    """Why a device that was measured cannot be used now; None: it can."""
    from neuronpipe.services.offload.gpu.device import describe

    try:
        found = describe(backend.partition(":")[2])
    except UserError as error:
        return str(error)
    if found.name != accelerator.name:
        return f"the first device is now {found.name}; `neuronpipe profile device` measures it"
    return None
