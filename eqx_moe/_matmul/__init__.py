"""Grouped matmul: one linear primitive, and the kernels that may stand behind it."""
