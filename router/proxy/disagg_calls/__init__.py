"""Calls of requests with disaggregated prefill.

caller         calls the prefill replica and the decode replica of a request
request_state  state of such a request, and helpers that read its answers
host_check     checks the hosts that a prefill answer names
"""
