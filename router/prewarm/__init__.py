"""Filling replicas' caches before their traffic comes: on joining, after a restart, or when asked.

A prompt is sent as its clients send it, with one token of answer (core/dialects/warming.py), straight to the replica,
and counted like a request: a lease is opened with the Router and given back, so that beliefs, speeds and bytes per
token are learned as from any other request.

warmer    which replica is warmed, when, and who waits for that
jobs      what is to be sent to one replica, and what came of it
prefixes  the prompts, from a file or a call
sending   one prompt to one replica
"""
