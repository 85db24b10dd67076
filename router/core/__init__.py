"""The thinking part of warmroute: state in, decision out.

Nothing here awaits, reads a clock, opens a socket or writes a log; `now_s` and random numbers come in as
arguments. So every decision can be tested without a loop, replayed, and raced in virtual time.

    admission    whose turn it is: windows, queue, rates, who is held back
    sharing      what this router and others tell each other, as messages
    placement    where a request goes: candidates, price, policies, receipts
    observatory  why prompts miss: memory of texts, their differences, a ledger of losses
    fleet        replicas: members, leases, fitness, stuck and slow ones, models
    cache        what replicas hold: our estimate, their own word, how far it is good
    dialects     OpenAI, Anthropic, Responses, SGLang: parsing, usage, errors, edits of bodies
    kv_events    one engine's event stream: decode, order, prove
    prompts      canonical bytes, template input, chains of keys
    learned      small models: prefill and step times, reuse, answers, bytes per token
    facts        the nouns: replicas, requests, placements, misses
"""
