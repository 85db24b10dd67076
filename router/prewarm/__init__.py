"""Fills replicas' caches before their traffic arrives: on joining, after a restart, or on request.

A prompt is sent as its clients send it, with one token of answer (core/dialects/prefill_only.py), straight to the
replica. It is counted like a request: a lease is opened with the Router and given back, so that cache estimates, speeds
and bytes per token are learned as from any other request.

warmer    choice of replicas to warm and the time of warming; defers traffic to them
jobs      prompts for one replica, and their results
prefixes  the prompts, from a file or a call
sender    one prompt to one replica
"""
