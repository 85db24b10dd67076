"""KV events of one engine: sockets, sources, following."""
