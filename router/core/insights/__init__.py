"""Reasons why prompts miss the cache.

prompt_memory         texts of earlier prompts, and the choice of the one to compare a prompt with
difference            first difference of two prompts, and its kind
ledger                sums of misses, and advice against them
two_generation_cache  bounded memory of blocks and prompts
token_funnel          outcome of each token of a breakdown, from requested to hit
breakdown             breakdown of a placement: every token a hit, or a miss with a reason
"""
