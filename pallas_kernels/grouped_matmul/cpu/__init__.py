"""Grouped products of packed weights on a CPU."""
