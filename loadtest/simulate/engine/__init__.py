"""The simulated cluster.

world           requests from arrival to end
placer          the real router, with the policy under test
cluster         replicas, probes, faults
replicas        the engine model under a virtual clock
kv_events       events from replicas to routers
shared_cache    one cache for all replicas
machine         a host with several replicas
workload        requests and their keys
capacity        the capacity of a cluster
cluster_spec    all parameters of a run
network         network delay
channel         messages between routers
with_admission  a world with the product's admission queue
split           a world with disaggregated prefill
"""
