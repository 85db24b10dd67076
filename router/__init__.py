"""warmroute: sends each LLM request to the replica that already holds the longest part of its prompt.

A map, top floor first (imports go down only, see ARCHITECTURE.md):

    __main__    argv -> settings -> run
    app         builds everything, owns tasks, drains
    settings    every setting, with unit, default and reason
    proxy       the life of one request
    admin, logs the router's own pages, and its log lines
    reading     what a client asks: read, parsed, hashed
    tokens      its token ids and their keys, and whether they can be trusted
    relay       bytes from engine to client
    upstream    call one engine; failures typed by what a retry may do
    probe       loops that ask engines for health, models and load
    ranks       how many data-parallel ranks a server has
    events      what engines say of their KV caches, over ZeroMQ
    announce    have an engine repeat what it said before we listened
    discovery   which replicas there are
    metrics     what Prometheus sees
    pages       asking engines for pages of their own
    prompts     chat template and tokenizer, off the loop (parts in prompting/)
    core        placement itself: pure, no I/O
"""

__version__ = "0.1.0"
