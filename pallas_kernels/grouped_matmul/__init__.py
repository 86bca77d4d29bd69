"""Matrix products of mixtures of experts, each row with the weight of its expert: the contract, and its backends."""

from pallas_kernels.grouped_matmul.api import grouped_matmul
from pallas_kernels.grouped_matmul.backends import BACKENDS
from pallas_kernels.grouped_matmul.gate import Activation, Gate
from pallas_kernels.grouped_matmul.groups import Groups

__all__ = ["BACKENDS", "Activation", "Gate", "Groups", "grouped_matmul"]
