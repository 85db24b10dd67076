"""HTTP data plane. It receives client requests, places and forwards them, and relays the answers.

This package reaches the placement layer through `placement_api` and never imports `router.control` (a contract in
pyproject.toml). Requests are parsed in `ingress`, which the ext_proc frontend uses too.

http_frontend    owns the parts and the listener
routes           dispatches requests by path: to an engine, to one of the router's pages or to a 404
preflights       forwards CORS preflights to engines if the router has no list of origins
http_proxy       main flow of one request to an engine
attempts         placement, call and retries until an answer has begun (limited by retry_budget)
disagg_calls     calls of requests with disaggregated prefill
preamble_events  streams that begin with events sent before any GPU work
stream_failover  stream failover after a break or before a replica leaves
failover_sink    events of such a stream: recorded, and passed to its relay
relay            copies the answer's bytes from engine to client
"""
