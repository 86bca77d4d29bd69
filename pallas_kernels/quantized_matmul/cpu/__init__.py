"""The backend for CPUs: a layout of its own, and a kernel in LLVM's language."""
