"""Grouped products on TPUs."""
