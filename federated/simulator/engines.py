"""Engines by name.

======== =====================================================================================================
name     trains
======== =====================================================================================================
auto     batched, or torch on another device and for what has no twin in NumPy; numpy for item tables
numpy    client by client with ``device.local_update``: the reference, the same bits as real devices
batched  whole cohorts on a batch axis with NumPy: the fastest on a CPU for small networks
torch    the same with torch, on ``cpu`` or ``cuda``; and any ``torch.nn.Module``
======== =====================================================================================================
"""

from __future__ import annotations

from federated.models import Model
from federated.recommendation.model import ItemTable
from federated.simulator.arrays import NumpyArrays
from federated.simulator.batched import BatchedEngine
from federated.simulator.cohort import Engine
from federated.simulator.networks import has_twin, twin
from federated.simulator.reference import ReferenceEngine

ENGINES = ("auto", "numpy", "batched", "torch")

CPU_MEMORY_BYTES = 8 * 1024 * 1024
"""Per thread: about what the caches of a core hold. More is not faster on a CPU."""
CUDA_MEMORY_BYTES = 2 * 1024 * 1024 * 1024


def make_engine(
    name: str, model: Model, *, device: str = "cpu", memory_bytes: int = 0, threads: int = 1
) -> Engine:
    """The engine ``name`` for ``model``; ``memory_bytes`` 0 takes the device's default, ``threads`` are cores in use.

    Raises ValueError for an unknown name or a device that is not there, NoTwin when the model cannot be batched.
    """
    if name == "auto":
        name = "batched" if device == "cpu" and has_twin(model) else "torch"
        if device == "cpu" and isinstance(model, ItemTable):
            name = "numpy"  # a device's step is large matrix products already
    if name not in ENGINES:
        raise ValueError(f"engine {name!r} is none of {', '.join(ENGINES)}")
    if name != "torch" and device != "cpu":
        raise ValueError(f"engine {name} computes on the cpu: use engine torch for device {device}")
    if name == "numpy":
        return ReferenceEngine(model)
    budget = memory_bytes or (CUDA_MEMORY_BYTES if device.startswith("cuda") else CPU_MEMORY_BYTES)
    if name == "batched":
        arrays = NumpyArrays()
        return BatchedEngine(
            name, twin(model, arrays), model.layout(), arrays, memory_bytes=budget, threads=threads
        )
    # torch is imported here: the other engines do without it.
    from federated.simulator.modules import ModuleModel, module_network
    from federated.simulator.torch_arrays import TorchArrays

    tensors = TorchArrays(device)
    network = module_network(model, tensors) if isinstance(model, ModuleModel) else twin(model, tensors)
    if device.startswith("cuda"):
        threads = 1  # one stream of kernels keeps the device busy
    return BatchedEngine(name, network, model.layout(), tensors, memory_bytes=budget, threads=threads)
