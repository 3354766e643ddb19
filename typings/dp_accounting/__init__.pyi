from enum import Enum

from dp_accounting import pld as pld
from dp_accounting import rdp as rdp

class DpEvent: ...

class GaussianDpEvent(DpEvent):
    def __init__(self, noise_multiplier: float) -> None: ...

class LaplaceDpEvent(DpEvent):
    def __init__(self, noise_multiplier: float) -> None: ...

class RandomizedResponseDpEvent(DpEvent):
    def __init__(self, noise_parameter: float, num_buckets: int) -> None: ...

class ZCDpEvent(DpEvent):
    def __init__(self, rho: float, xi: float = 0.0) -> None: ...

class PoissonSampledDpEvent(DpEvent):
    def __init__(self, sampling_probability: float, event: DpEvent) -> None: ...

class SampledWithoutReplacementDpEvent(DpEvent):
    def __init__(self, source_dataset_size: int, sample_size: int, event: DpEvent) -> None: ...

class NeighboringRelation(Enum):
    ADD_OR_REMOVE_ONE = 1
    REPLACE_ONE = 2
    REPLACE_SPECIAL = 3

class UnsupportedEventError(Exception): ...

def get_sigma_gaussian(epsilon: float, delta: float) -> float: ...
def get_epsilon_gaussian(sigma: float, delta: float) -> float: ...
