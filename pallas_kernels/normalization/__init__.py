"""Norms and log-sum-exps of rows; on a CPU, added in one order whatever other rows there are and whatever XLA fuses."""

from pallas_kernels.normalization.api import layer_norm, log_sum_exp, rms_norm
from pallas_kernels.normalization.reference import scaled

__all__ = ["layer_norm", "log_sum_exp", "rms_norm", "scaled"]
