"""What the simulated engine's step times are held against: kernels of a real GPU, measured and compared."""
