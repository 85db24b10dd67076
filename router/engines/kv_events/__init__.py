"""KV events of engines over ZeroMQ: what they mean is core/kv_events/.

subscriber  follows all replicas
follower    follows one replica
sources     where a replica publishes
sockets     ZeroMQ, and the only module that knows it
"""
