"""Histories of four routers that share a real store, and the model that each history is held to.

`python -m loadtest faults --histories SECONDS` draws faults from a seed: routers that are stopped, killed and started
again, networks that are cut in either direction, a store that is emptied, frozen, full, killed, or fails over to its
replica, an engine that goes away, wall clocks that differ by 5 s.
"""
