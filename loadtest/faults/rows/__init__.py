"""Rows of the fault matrix: what happens, and what must come of it.

early, endings  before and within an answer    health, drain, leaving  replicas, the router, clients that go
overload        more than engines can do       abuse, bodies, memory   what clients must not be able to do
tenants         one of eight is hostile
"""
