"""The second face: an endpoint picker for Envoy and the Gateway API, by Envoy's external processing over gRPC.

Envoy carries the bytes. For each request it opens a stream here, sends the head and the body, and is told which replica
takes them, and which others if that one cannot be reached. This room asks a hub through `placer.Placer`, reads requests
in `reading` as the other face does, and imports neither `router.hub` nor `router.edge` (contracts in pyproject.toml).

gateway       owns the listeners, health, TLS, and the life of the face
picker        what all streams share, and the service that they come to
stream        the story of one request: read, placed, told, served, ended
incoming      its body, in whatever pieces the gateway sends it
head          an HTTP request out of Envoy's headers, and what of them goes on
hints         what gateways and clients say in headers and metadata: subset, served, objective, fairness, SLO, model
endpoints     replicas as addresses, the chosen one first
answer        what is seen of an answer, and what became of its lease
words         answers to Envoy, as bytes
extproc_pb2   messages, made of extproc.proto by `python -m deploy.protos`

Its libraries are the extra `gateway`, imported only where `listen.face` asks for this face.
"""
