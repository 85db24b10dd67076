"""The second face: an endpoint picker for Envoy and the Gateway API, by Envoy's external processing over gRPC.

Envoy carries the bytes. For each request it opens a stream here, sends the head and the body, and is told which replica
takes them, and which others if that one cannot be reached. This room asks a hub through `placer.Placer`, reads requests
in `reading` as the other face does, and imports neither `router.hub` nor `router.edge` (contracts in pyproject.toml).

gateway       owns the listeners, health, and the life of the face; credentials are its TLS
picker        the service that gateways call; parts are what all its streams share
stream        the story of one request: read, placed, told
following     from its lease to its end: who served, what the client is told; answer is what is seen of the answer
heads         whose first message is read
messages      what a stream brings, one message after the other, once there is room for it
incoming      its body, in whatever pieces the gateway sends it
head          an HTTP request out of Envoy's headers, and what of them goes on
hints         what gateways and clients say in headers and metadata: subset, served, objective, fairness, SLO, model
endpoints     replicas as addresses, the chosen one first
words         answers to Envoy, as bytes; wire is protobuf's format for those
extproc_pb2   messages from Envoy, made of extproc.proto by `python -m deploy.protos`

Its libraries are the extra `gateway`, imported only where `listen.face` asks for this face.
"""
