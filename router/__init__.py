"""warmroute: sends each LLM request to the replica that already holds the longest part of its prompt.

A map, top floor first (imports go down only, see ARCHITECTURE.md):

    __main__    argv -> settings -> run
    app         builds everything, owns tasks, drains
    settings    every setting, with unit, default and reason
    proxy       the life of one request
    reading     what a client asks: read, parsed, hashed
    relay       bytes from engine to client
    upstream    call one engine; failures typed by what a retry may do
    admin, logs the router's own pages, and its log lines
    probe       loops that ask engines for health, models and load
    discovery   which replicas there are
    metrics     what Prometheus sees
    core        placement itself: pure, no I/O
"""

__version__ = "0.1.0"
