"""Several processes that face clients, and one that decides: `--workers N`.

    supervisor   the command's own process: binds the sockets, starts the others, restarts whoever dies
    worker       an edge of its own (listener, proxy, relay); places through RemotePlacer (client.py)
    hub          index, probes, events, metrics, admin pages; places for all workers (hub_server.py)

Workers and hub talk over a unix socket in a private folder (wire.py). All workers accept on one inherited socket, so
a connection that waits when a worker dies is accepted by another. Without the hub a worker places by the
consistent-hash ring over the replicas it last knew as ready (view.py), and says so.

Each worker has a retry budget, a memory of token ids and connections to replicas of its own. Log lines of requests are
written by the worker, all metrics by the hub, of the records that workers send.

With one worker nothing of this package is loaded.
"""
