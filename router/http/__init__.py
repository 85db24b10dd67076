"""HTTP/1.1 layer for both sides: connections from clients and to engines.

This package handles bytes and limits, and knows no prompt, dialect or policy (a contract in pyproject.toml). It imports
settings and facts of the core, and no higher layer.

server             the main listener: admission, timeouts and shutdown
client_connection  one client's connection with its requests and answers in order
receiver           parses bytes into requests
read_flow          flow control of reads from one client connection
read_fairness      limits the bytes read from any peer in one turn of the event loop
body_budget        memory budget for all request bodies that a process holds
request            one request with the interface to its connection and its possible refusal
acceptor           connection slots and the accept loop for TLS connections
client_timeouts    time limits for clients
upstream           calls to engines and their watchdog
pool               one engine's address with its free connections
exchange           an engine's answer to one request
engine_connection  one connection to an engine, which relays whole chunks unparsed and parses the rest in slices
chunk_passthrough  chunks that may be relayed unparsed
failures           failures of a call, typed by the retries that they allow
engine_errors      the failures that carry an answer
outbox             batches small writes over one turn of the event loop
cors               CORS headers of answers
"""
