"""The simulated world: cluster, replicas, router, KV events, turns of conversations."""
