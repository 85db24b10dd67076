"""KV events of one engine over ZeroMQ: sockets, sources, following, subscribing."""
