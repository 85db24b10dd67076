"""Several processes that face clients, and one that decides: `--workers N`. With one worker nothing here is loaded.

supervisor     the command's own process: binds the sockets, starts the others, restarts those that die
child          a process that it starts, hub or worker; orders are what it is told
hub_server     the hub's side: places for all workers, and is the hub's edges
remote_placer  the worker's side: places through the hub, or by the ring while there is none
hub_watch      whether the hub places
lease          a lease, as a worker has it
view           what a worker knows of replicas
rate_shares    what a worker knows of tenants' rates, and its part of them without the hub
template_news  what a worker tells of templates
link           a worker's connection; messages are what is said over it, codec makes them of facts and back

Workers and hub talk over a unix socket in a private folder. All workers accept on one inherited socket, so that a
connection which waits when a worker dies is accepted by another. Without the hub a worker places by the consistent-hash
ring over the replicas it last knew as ready, and says so. Each worker has a retry budget, a memory of token ids and
connections to replicas of its own; it writes the log lines of its requests, and the hub has all metrics.
"""
