"""Grouped products on NVIDIA GPUs from Ampere on."""
