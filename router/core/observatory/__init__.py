"""Why prompts miss the cache.

memory       what earlier prompts said, and whom a prompt is compared with
difference   where two prompts first differ, and how
ledger       what misses add up to, and what to do about them
generations  what is remembered of blocks and prompts, within a strict bound
places       where each token of a breakdown ended, from asked to hit
explain      a placement and a sighting make a breakdown: every token a hit, or a miss with a reason
"""
