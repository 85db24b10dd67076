"""Replicas: members, leases, fitness, models."""
