"""One engine's stream of KV events: decode, order, prove."""
