"""Compiled CPU kernels. Import `kernels.cpu.ops` inside `setup.compiled_code_kept_in`, as `kernels.ops.select` does."""
