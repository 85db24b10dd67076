"""Renders documents from the output of benchmarks."""
