"""Kernels by family. Imports torch, and triton only where a kernel is launched; never sglang."""

__version__ = "0.1.0"
