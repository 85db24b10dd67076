"""Multi-process mode, `--workers N`: several data-plane processes and one control-plane process. With one worker no
module of this package is loaded.

supervisor        the command's own process: binds the sockets, starts the others, restarts those that die
child             a child process, hub or worker; orders are the messages to it
control_server    the hub's side: places for all workers, and is the hub's `Frontends`
remote_placement  the worker's side: places through the hub, or by the ring while the hub is lost
control_health    decides if the hub is available
remote_lease      a lease in a worker
replica_view      a worker's copy of the replicas
rate_quota        a worker's copy of tenants' rates, and its part of them without the hub
template_updates  a worker's reports of templates
control_link      a worker's connection to the hub; messages are its protocol, codec converts objects

Workers and hub communicate over a unix socket in a private folder. All workers accept on one inherited socket. So a
connection that waits when a worker dies is accepted by another. Without the hub a worker places by the consistent-hash
ring over the replicas last known as ready, and reports that. Each worker has a separate retry budget, a memory of token
ids and connections to replicas. It writes the log lines of its requests, and the hub has all metrics.
"""
