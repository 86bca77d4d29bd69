"""Kernels of jaxserve: a folder each, with the public function, the XLA reference that is its contract, and backends.

Nothing here imports jaxserve.
"""
