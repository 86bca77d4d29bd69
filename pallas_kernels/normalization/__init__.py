"""What rows are normalized by, on a CPU: in one order of additions, whatever rows there are and whatever XLA fuses."""

from pallas_kernels.normalization.cpu import log_sum_exp, rms_norm, takes_rms_norm

__all__ = ["log_sum_exp", "rms_norm", "takes_rms_norm"]
