"""Triton kernels for NVIDIA GPUs (designed for sm_90): paged INT8 attention, the KV write and the RMS norm.

Importing a module of this package imports triton; `kernels.ops.select` does so only when this backend is chosen.
"""
