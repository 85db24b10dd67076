"""Endpoint picker frontend for Envoy and the Gateway API, by Envoy's external processing (ext_proc) over gRPC.

Envoy carries the bytes. For each request it opens a stream to the picker, and sends the head and the body. The picker
returns the replica for the request, and fallbacks in case that replica cannot be reached. This package reaches the
placement layer through `placement_api`, parses requests in `ingress` like the HTTP frontend, and imports neither
`router.control` nor `router.proxy` (contracts in pyproject.toml).

frontend              listeners, health checks and lifecycle of this frontend
certificate           TLS of the picker
service               the gRPC service that gateways call
picker_context        state shared by all streams of a picker
stream_handler        main flow of one request from its head to its endpoint
response_tracker      the request from its lease to the end of its answer
response_observer     observes the answer and derives the outcome of the lease
first_message_limit   limits the number of first messages that are read at a time
stream_messages       reads and parses the messages of a stream after memory for them is reserved
request_body          the request's body in any pieces that the gateway sends
request_headers       parses an HTTP request from Envoy's headers and computes the header mutations for the engine
metadata              headers and metadata of gateways and clients (subset / served / objective / fairness / model)
endpoints             addresses of replicas with the chosen one first
processing_responses  encodes responses to Envoy
extproc_pb2           messages from and to Envoy, generated from extproc.proto by `python -m deploy.protos`

Its libraries are the extra `gateway`, imported only if `listen.mode` selects this frontend.
"""
