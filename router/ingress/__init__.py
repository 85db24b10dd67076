"""Request parsing, before any decision: the caller, the prompt, and the body for the engine.

Both frontends (proxy/, extproc/) use this package. So keys, rates, isolation, repairs and the observatory are the same
for each way into the router. No module here depends on how a request arrived, or on how its answer is returned.

desk          the parts that the frontends of one process share, and their settings
paths         paths for engines, and all others
callers       caller of a request; kinship is the identity of its conversation
charge        a request is taken from its tenant's rate before its body is read
deadlines     deadline of a client for its first token
reader        parses requests; body parses and hashes, in turns if it is long; question is the result
continuing    decides on stream failover
forwarding    header lines for engines
observer      compares a prompt with the texts of earlier prompts
placing       a lease, or a refusal with a message for the client
answering     answers of the router itself: ids, errors, pages
used          tokens of an answer if its engine does not count them
"""
