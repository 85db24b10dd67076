"""What the simulated engine's times are held against: kernels and transfers of a real GPU, measured and compared."""
