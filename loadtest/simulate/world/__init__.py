"""The simulated world.

world     requests from arrival to end         placer     the real router, with a rule in place of its policy
cluster   replicas, probes, faults             replicas   the engine model under a virtual clock
kv_events what replicas tell the router        shared_cache  one cache for all replicas
turns     requests and their keys              capacity   what a cluster can sustain
setting   everything that a run is given       wire       time on the way
channel   what routers tell each other         admitted   a world whose router lets requests wait
split     a world of two legs
"""
