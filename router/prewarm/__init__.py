"""Filling replicas' caches before their traffic comes: on joining, after a restart, or when asked.

A prompt is sent as its clients send it, but for one token of answer (core/dialects/warming.py), straight to the
replica and through the Router's books: a lease is opened there and given back, so that beliefs, speeds and bytes per
token are learned as from any other request (sending.py). Whom to warm, when, and who waits for it: warmer.py.
"""
