"""Simulation of a prompt in one pass: NPU or cores compute a layer while flash reads the next one.

npu_prefill.py simulates our worker on an NPU.
"""

from __future__ import annotations

from neuronpipe.plans.lab.simulate.decode import Situation
from neuronpipe.plans.lab.simulate.events import Simulation, Task
from neuronpipe.plans.lab.simulate.npu_prefill import has_npu_worker, simulate_npu_prefill

LAYERS_AHEAD = 1


def prefill_s(situation: Situation, prompt_tokens: int) -> float:
    device, model, system = situation.device, situation.model, situation.system
    if system.name == "ours" and device.has_npu and has_npu_worker(model.spec):
        return simulate_npu_prefill(situation, prompt_tokens).seconds
    spec, simulation = model.spec, Simulation(device, system.compute_cores(device))
    layer_bytes = model.ffn_bytes / spec.layers
    missing = 0.0 if situation.resident >= 1 else 1.0 if system.all_layers else 1 - situation.resident
    on_npu = device.has_npu and not system.mapped and system.npu
    done: list[list[Task]] = []
    read: list[Task] = []
    for layer in range(spec.layers):
        if missing:
            size = layer_bytes * missing
            after = [*read, *(done[layer - 1 - LAYERS_AHEAD] if layer > LAYERS_AHEAD else [])]
            seconds = size / device.sequential_bytes_per_s()
            read = [simulation.add("flash", "read", layer, seconds=seconds, bytes=size, after=after)]
        before = done[-1] if done else []
        if on_npu:
            done.append([_npu(situation, simulation, layer, prompt_tokens, layer_bytes, read, before)])
        else:
            flops = 2 * model.computed_weights / spec.layers * prompt_tokens
            dense_bytes = flops / 2 * model.bits_per_weight / 8  # a core's speed is in bytes of weights
            each = simulation.computing_s(dense_bytes / simulation.cores, 1)
            tasks = [
                simulation.add("cpu", "neurons", layer, seconds=each, after=[*read, *before])
                for _ in range(simulation.cores)
            ]
            done.append(tasks)
    simulation.run()
    return simulation.now_s


def _npu(
    situation: Situation,
    simulation: Simulation,
    layer: int,
    tokens: int,
    layer_bytes: float,
    read: list[Task],
    before: list[Task],
) -> Task:
    """Add a layer on the NPU. If not all layers are resident, a core copies the layer's weights to the NPU's memory
    first."""
    device, model = situation.device, situation.model
    if situation.resident < 1:
        seconds = layer_bytes / (device.copy_gb_per_s.value * 1e9)
        before = [simulation.add("cpu", "copy", layer, seconds=seconds, after=[*read, *before])]
    flops = 2 * model.computed_weights / model.spec.layers * tokens
    seconds = flops / (device.npu_tflop_per_s.value * 1e12) + device.npu_start_us.value * 1e-6
    return simulation.add("npu", "neurons", layer, seconds=seconds, after=before)
