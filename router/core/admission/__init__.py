"""Admission control: windows of replicas, the queue, rate limits, and deferral."""
