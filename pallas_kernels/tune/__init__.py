"""Times block sizes of kernels on the device at hand and writes its tuned tables: `python -m pallas_kernels.tune`."""
