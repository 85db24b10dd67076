"""HTTP/1.1 both ways, byte for byte: from clients, to engines. Knows no prompt.

server             listens; client_connection is one client, receiver turns its bytes into requests
accepting          who may connect, and connections that are to speak TLS
deadlines          how long a client may take
upstream           calls engines; pool has one engine's connections, exchange is one request and its answer
failures           what may go wrong with that, typed by what a retry may do
outbox             small writes, gathered over one turn of the event loop
"""
