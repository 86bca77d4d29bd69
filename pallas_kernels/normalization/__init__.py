"""Norms and log-sum-exps of rows. On a CPU, other rows and XLA's fusions don't change the order of additions."""

from pallas_kernels.normalization.api import layer_norm, log_sum_exp, rms_norm
from pallas_kernels.normalization.reference import scaled

__all__ = ["layer_norm", "log_sum_exp", "rms_norm", "scaled"]
