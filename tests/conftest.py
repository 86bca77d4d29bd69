"""Tests run on the CPU unless somebody says otherwise: set before anything imports jax."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
