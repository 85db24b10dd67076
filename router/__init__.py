"""warmroute: sends each LLM request to the replica that already holds the longest part of its prompt.

Layers, the highest first. Imports go only downwards (see ARCHITECTURE.md):

    commands    command line: serve, check-config, make-key, top, explain; audit: request logs offline
    app         one process: a hub and its frontends
    workers     several processes: a supervisor, a hub, and an edge each; the protocol between them
    edge        frontend for clients: reads a request, places it, calls the replica, relays and reports
    gateway     frontend for gateways: the endpoint picker, which returns a destination for each request
    hub         control plane: the placer of this process, admission, the roster of replicas
    reading     parses a request: its caller, its prompt, and the body for the engine
    admin       the hub's own pages, their access control, the dashboard
    tokens      a request's token ids, as the engine would make them
    placer      interface between frontends and the hub
    prewarm     fills caches before their traffic comes
    telemetry   metrics, logs and traces
    engines     replicas as sources of data: discovery, probes, KV events
    http        HTTP/1.1 in both directions, byte for byte: from clients, to engines
    sharing     exchange of state between several routers, through a store
    settings    every setting, the files that they name, secrets, TLS, API keys
    loop        the event loop, its collector, tasks in the background
    core        placement itself: no clock, no socket, no loop, no log
"""

__version__ = "0.1.0"
