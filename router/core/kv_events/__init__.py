"""Stream of KV events of one engine: decoding, ordering, proof of continuity."""
