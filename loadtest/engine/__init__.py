"""A simulated replica: its speed, its KV pool, its HTTP, metrics and KV events."""
