"""Observation of engines that take stages of requests with disaggregated prefill.

kv_connectors  checks of KV connectors
pair_warmup    warm-up of pairs of a prefilling and a decoding replica
"""
