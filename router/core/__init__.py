"""Decisions of the router: state in, decision out.

Nothing here awaits, reads a clock, opens a socket or writes a log; `now_s` and random numbers come in as
arguments. So every decision can be tested without a loop, replayed, and raced in virtual time.

    disagg       disaggregated prefill: pairs of replicas, bodies of both stages
    admission    concurrency windows, queue, rate limits, deferral
    peer_sync    messages between routers: their content, and its application
    placement    candidates, price, policies, receipts
    insights     reasons of cache misses: memory of texts, differences, a ledger of lost tokens
    fleet        replicas: members, leases, eligibility, stall and outlier detection, models
    cache_state  cached blocks of replicas: estimated, or reported by the engine, and the confidence in both
    dialects     OpenAI, Anthropic, Responses, SGLang: parsing, usage, errors, edits of bodies
    kv_events    the event stream of one engine: decoding, order, continuity
    prompts      canonical bytes, template input, chains of block keys
    estimators   models fitted from answers: prefill and step times, reuse, output lengths, bytes per token
    types        records: replicas, requests, placements, misses
"""
