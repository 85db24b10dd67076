"""HTTP data plane. It receives client requests, places and forwards them, and relays the answers.

This package reaches the placement layer through `placer.Placer` and never imports `router.control` (a contract in
pyproject.toml). It is therefore the same with one process and with many. Requests are parsed in `reading`, which the
gateway frontend uses too.

edge          owns the parts and the listener
routes        dispatches requests by path: to an engine, to one of the router's pages or to a 404
preflights    forwards CORS preflights to engines if the router has no list of origins
proxy         main flow of one request to an engine
attempts      placement, call and retries until an answer has begun (limited by retry_budget)
legs          disaggregated prefill with a prefill replica and a decode replica
early         streams that begin with events sent before any GPU work
continuing    stream failover after a break or before a replica leaves
relay         copies the answer's bytes from engine to client
"""
