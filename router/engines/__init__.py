"""Discovery and observation of engines: their health, models, load and KV events.

Except for the calls of requests (http/) and prewarming, this is the only package that connects to engines. It passes
its observations to the Router.

discovery/      the set of replicas
probe           health, models and load of replicas
metrics_page    reader of `/metrics`, shared by probe and ranks
ranks           number of data-parallel ranks of a server
kv_events/      blocks in replicas' caches, from their KV events
replay_trigger  requests that make a replica report its cached blocks again
p2p_prober      checks that an engine accepts requests of its peers, for P2P KV transfer
disagg_probes/  KV connectors and warm-up of pairs, for disaggregated prefill
http_client     session and reader for an engine's own pages
"""
