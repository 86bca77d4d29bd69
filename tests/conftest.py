"""Tests run on the CPU unless somebody says otherwise: set before anything imports jax."""

import os
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Threads of XLA's that wait in Mosaic GPU's interpreter would leave none on a small machine to those they wait for.
os.environ.setdefault("NPROC", str(max(8, os.cpu_count() or 1)))

# A shell starts what it runs in the background with Ctrl-C ignored, which would be inherited by all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
