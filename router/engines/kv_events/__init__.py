"""Receivers of engines' KV events over ZeroMQ. core/kv_events/ decodes and orders the events.

subscriber       streams of all replicas
follower         stream of one replica
sources          address at which a replica publishes
addresses        addresses of the name in an endpoint
snapshot_resume  transfer of a replica's state between processes
sockets          ZeroMQ sockets; the only module that uses pyzmq
"""
