"""Kernels of jaxserve: one folder each, with the public function, the XLA reference that is its contract, and backends.

Knows jax and numpy only.
"""
