"""Replica with faults on demand: `process` listens, `connection` executes, `answers` has the healthy responses."""
