"""The sections of `benchmarks/device.py`, each a function that takes a `SectionRun`."""
