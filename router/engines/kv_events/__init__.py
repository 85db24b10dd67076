"""KV events of engines over ZeroMQ: what they mean is core/kv_events/.

subscriber  follows all replicas
follower    follows one replica
sources     where a replica publishes
handover    where another process goes on with a replica's stream
sockets     ZeroMQ, and the only module that knows it
"""
