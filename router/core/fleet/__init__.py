"""Replicas: members and their leases, who is fit, stuck or slow, and which models they serve."""
