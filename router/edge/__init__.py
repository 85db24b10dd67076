"""Faces clients: the life of one request, read, placed, called, relayed, told.

This room asks a hub through `placer.Placer` and never imports `router.hub` (a contract in pyproject.toml), so that it
is the same with one process and with many.

edge          owns the parts and the listener
routes        where a request goes: to an engine, one of our own pages, or nowhere
callers       whose request it is
proxy         the story of one request that goes to an engine
reader        what a client asks; body parses and hashes, in turns if it is long; question is what comes of it
observer      what earlier prompts' texts say of a prompt
attempts      placing and calling until an answer has begun, within a retry_budget
relay         bytes from engine to client
answering     answers of our own: ids, errors, pages
"""
