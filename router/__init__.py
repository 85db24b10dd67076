"""warmroute: sends each LLM request to the replica that already holds the longest part of its prompt.

Layers, the highest first. Imports go only downwards (see ARCHITECTURE.md):

    cli             command line: serve, config, check-config, make-key, top, explain; audit: request logs offline
    router_server   one process: a control plane and its frontends
    proxy           frontend for clients: reads a request, places it, calls the replica, relays and reports
    extproc         frontend for gateways: the endpoint picker, which returns a destination for each request
    control         control plane: placement in this process, admission, the lifecycle of replicas
    ingress         parses a request: its caller, its prompt, and the body for the engine
    admin           pages of the control plane, their access control, the dashboard
    tokenization    a request's token ids, as the engine would make them
    placement_api   interface between frontends and the control plane
    prewarm         fills caches before their traffic arrives
    telemetry       metrics, logs and traces
    engines         replicas as sources of data: discovery, probes, KV events
    http            HTTP/1.1 in both directions, byte for byte: from clients, to engines
    peering         exchange of state between several routers, through a store
    config          every setting, the files that they name, secrets, TLS, API keys
    eventloop       the event loop, its garbage collector, tasks in the background
    former_names    names of the outer surface that are read or emitted until the next release but one
    core            decisions: no clock, no socket, no event loop, no log
"""

__version__ = "0.1.0"
