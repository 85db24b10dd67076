"""What a request says, read before anything is decided: whose it is, what it asks, and what becomes of its body.

Every face reads here (edge/, gateway/), so that keys, rates, isolation, repairs and the observatory are the same by
whichever way a request comes. Nothing here knows how a request came, or how its answer goes back.

desk          the parts that the faces of one process share, and their settings
paths         what is for engines, and what is not
callers       whose request it is; kinship is whose conversation
charge        a request is taken from its tenant's rate before its body is read
deadlines     by when a client wants its first token
reader        what a client asks; body parses and hashes, in turns if it is long; question is what comes of it
continuing    whether a stream that breaks may go on elsewhere
forwarding    header lines for engines
observer      what earlier prompts' texts say of a prompt
placing       a lease, or a refusal in words for the client
answering     answers of our own: ids, errors, pages
used          tokens of an answer whose engine does not count them
"""
