"""warmroute: sends each LLM request to the replica that already holds the longest part of its prompt.

A map, top floor first (imports go down only, see ARCHITECTURE.md):

    __main__    argv -> settings -> run
    app         a hub and an edge in one process
    workers     several processes: a supervisor, a hub, an edge each
    audit       request logs read offline (parts in auditing/)
    top         the dashboard in a terminal
    edge, hub   what faces clients; what knows the replicas and places
    admin_listener  the hub's pages behind their guard
    running     what both need to be put together
    reloading   settings read again while it runs
    settings_loading  settings from all sources, checked
    settings    every setting, with unit, default and reason
    observatory what requests add up to, and its pages; dashboard has the page's files
    prewarm     filling replicas' caches before traffic (prefixes: with what)
    proxy       the life of one request
    attempts    its placing and calling, until an answer has begun
    additions   replicas that are added at run time
    admin       the router's own pages
    guard       who may use the admin listener
    callers     whose request it is
    trust       whether our token ids are the engines'
    reading     what a client asks: parsed, hashed
    history     what is said of a conversation whose history has changed
    observing   what earlier prompts' texts say of it
    tokens      its token ids and their keys
    relay       bytes from engine to client
    upstream    call one engine
    probe       loops that ask engines for health, models and load
    ranks       how many data-parallel ranks a server has
    events      what engines say of their KV caches, over ZeroMQ
    announce    have an engine repeat what it said before we listened
    discovery   which replicas there are
    failures    what may go wrong with that, typed by what a retry may do; totals adds up processes
    placing     the seam between edge and hub
    admission   who is placed now, who waits, who is turned away
    exchange    one request and its answer on a connection to an engine
    breaks      how such an exchange may end badly
    serving     HTTP/1.1 from clients; client_connection is one of theirs
    accepting   who may connect; connections that are to speak TLS
    patience    how long a client may take
    receiving   bytes to requests, with a limit on everything
    outbox      small writes, gathered over one turn of the event loop
    logs        log lines; log_writer writes them in a thread
    tracing     OpenTelemetry traces, where they are wanted; moments are what spans are made of
    metrics     what Prometheus sees; tallies counts it in series, stalls times the event loop
    pages       asking engines for pages of their own
    keys        API keys and tenants; networks where replicas may be; secret: given, or in a file
    tls         contexts for TLS, and what is wrong with their files
    envelope    where figures come from: command, commit, machine
    prompts     chat template and tokenizer, off the loop (parts in prompting/)
    core        placement itself: pure, no I/O
"""

__version__ = "0.1.0"
