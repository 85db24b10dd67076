"""Knows and decides: the placer of this process, admission, the roster of replicas."""
