"""HTTP/1.1 both ways, byte for byte: from clients, to engines.

This room knows bytes and limits, and no prompt, dialect or policy (a contract in pyproject.toml). It imports settings
and facts of the core, and nothing above.

server             the main listener: who is let in, who takes too long, how to stop
client_connection  one client's connection: requests one after the other, and their answers
receiver           bytes to requests; intake is what a connection reads and when, pace how much of any peer in one turn
body_budget        room for all bodies of requests that a process holds
request            one request, what its connection offers, and the refusal that may answer it
accepting          slots for connections, and accepting those that are to speak TLS
deadlines          how long a client may take
upstream           calls to engines, and the watchdog over them
pool               one engine's address, with its free connections
exchange           an engine's answer to one request
engine_connection  one connection to an engine; chunks are handed on as they came, and everything else in slices
failures           what may go wrong with a call, typed by what a retry may do
engine_failed      the one failure that has an answer with it
outbox             small writes, gathered over one turn of the event loop
"""
