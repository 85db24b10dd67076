"""Knows and decides: one hub for all edges. It knows no HTTP client and moves no byte of an answer; edges reach it
through the `placer` only, and it reaches them through `Edges`.

hub           the hub's life, and what it is told
assembly      its parts, made from settings
parts         what those parts may ask of it and of each other
roster        which replicas there are, and the tasks that watch each
local_placer  what an edge of this process asks
admitter      who is placed now, who waits, who is turned away
owners        which replica made a stored response
sharing       the link to other routers, where the settings name a store
warm_start    beginning with what was known before; state_file keeps that, knowing makes the pieces
"""
