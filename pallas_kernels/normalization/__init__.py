"""RMS norms and log-sum-exps on a CPU, added in one order whatever other rows there are and whatever XLA fuses.

`triton.py` has the norm of a residual sum on a GPU; importing it loads Triton's front end.
"""

from pallas_kernels.normalization.cpu import log_sum_exp, rms_norm, supports_rms_norm

__all__ = ["log_sum_exp", "rms_norm", "supports_rms_norm"]
