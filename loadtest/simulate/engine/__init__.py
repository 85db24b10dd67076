"""The simulated world.

world     requests from arrival to end         placer     the real router, with a rule in place of its policy
cluster   replicas, probes, faults             replicas   the engine model under a virtual clock
kv_events events from replicas to routers      shared_cache  one cache for all replicas
turns     requests and their keys              capacity   the capacity of a cluster
setting   all parameters of a run              wire       network delay
channel   messages between routers             admitted   a world with the product's admission queue
split     a world with disaggregated prefill
"""
