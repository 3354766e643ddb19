from collections.abc import Mapping

from dp_accounting.pld.common import DifferentialPrivacyParameters

class PrivacyLossDistribution:
    def self_compose(self, num_times: int) -> PrivacyLossDistribution: ...
    def get_epsilon_for_delta(self, delta: float) -> float: ...
    def get_delta_for_epsilon(self, epsilon: float) -> float: ...

def from_gaussian_mechanism(
    standard_deviation: float, *, value_discretization_interval: float = 1e-4, sampling_prob: float = 1.0
) -> PrivacyLossDistribution: ...
def from_laplace_mechanism(
    parameter: float, *, value_discretization_interval: float = 1e-4
) -> PrivacyLossDistribution: ...
def from_privacy_parameters(
    privacy_parameters: DifferentialPrivacyParameters, value_discretization_interval: float = 1e-4
) -> PrivacyLossDistribution: ...
def from_two_probability_mass_functions(
    log_probability_mass_function_lower: Mapping[int, float],
    log_probability_mass_function_upper: Mapping[int, float],
    pessimistic_estimate: bool = True,
    value_discretization_interval: float = 1e-4,
) -> PrivacyLossDistribution: ...
