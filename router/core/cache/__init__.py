"""Cached blocks of every replica: an estimate from our own traffic, the engine's own events, and the confidence in
them."""
