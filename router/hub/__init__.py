"""Knows and decides: the placer of this process, admission, the roster of replicas.

hub           owns what is known of replicas, and all that asks or hears them
local_placer  what an edge of this process asks
admitter      who is placed now, who waits, who is turned away
owners        which replica made a stored response
"""
