"""Endpoint picker frontend for Envoy and the Gateway API, by Envoy's external processing (ext_proc) over gRPC.

Envoy carries the bytes. For each request it opens a stream to the picker, and sends the head and the body. The picker
returns the replica for the request, and fallbacks in case that replica cannot be reached. This package reaches the
placement layer through `placer.Placer`, parses requests in `reading` like the HTTP frontend, and imports neither
`router.hub` nor `router.edge` (contracts in pyproject.toml).

gateway       owns the listeners, the health checks and the lifecycle of this frontend; credentials is its TLS
picker        the service that gateways call; parts has the state shared by all its streams
stream        main flow of one request: read, place, respond
following     from the lease to its end: the serving replica and the client's headers; answer observes the answer
heads         limits the streams that may send a first message at a time
messages      parses the messages of a stream one by one, each after memory for it is reserved
incoming      the request's body, in any pieces that the gateway sends
head          parses an HTTP request from Envoy's headers, and computes the header mutations for the engine
hints         headers and metadata of gateways and clients: subset, served, objective, fairness, SLO, model
endpoints     addresses of replicas, the chosen one first
words         encodes responses to Envoy; wire is protobuf's format for these
extproc_pb2   messages from Envoy, generated from extproc.proto by `python -m deploy.protos`

Its libraries are the extra `gateway`, imported only if `listen.face` selects this frontend.
"""
