"""warmroute: sends each LLM request to the replica that already holds the longest part of its prompt.

The house, top floor first (imports go down only, see ARCHITECTURE.md):

    commands    what people type: serve, check-config, make-key, top, explain; audit: request logs offline
    app         one process: a hub and its faces, side by side
    workers     several processes: a supervisor, a hub, and an edge each; what they say to each other
    edge        faces clients: the life of one request, read, placed, called, relayed, told
    gateway     faces gateways: the picker, which is asked where each request goes
    hub         knows and decides: the placer of this process, admission, the roster of replicas
    reading     what a request says: whose it is, what it asks, what becomes of its body
    admin       the hub's own pages, their guard, the dashboard
    tokens      a request's token ids, as the engine would make them
    placer      the seam: what an edge asks a hub
    prewarm     filling caches before their traffic comes
    telemetry   what is counted, logged and traced
    engines     which engines there are and what they say: discovery, probes, KV events
    http        HTTP/1.1 both ways, byte for byte: from clients, to engines
    sharing     what several routers tell each other, through a store
    settings    every setting, the files that they name, secrets, TLS, API keys
    loop        the event loop, its collector, tasks in the background
    core        placement itself: no clock, no socket, no loop, no log
"""

__version__ = "0.1.0"
