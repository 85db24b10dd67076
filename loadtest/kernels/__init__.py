"""Kernels and transfers of a real GPU, measured and compared with the simulated engine's times."""
