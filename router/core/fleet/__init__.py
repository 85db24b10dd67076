"""Replicas: members and their leases, fitness, detection of stalled replicas and latency outliers, and served
models."""
