"""Which engines there are and what they say: discovery, probes, data-parallel ranks, KV events."""
