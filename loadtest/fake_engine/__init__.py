"""Simulated replica: vLLM's HTTP API and KV events on top of a model of vLLM's scheduler.

model                        continuous batching, in simulated seconds
step, request                inputs and outputs of the model
decode_batch                 sequences that decode
kv_pool                      KV blocks and their prefix cache
tier_load                    sequences that wait for tier loads
host_tier                    CPU memory tier of the KV blocks
peers                        P2P KV transfers between those tiers
prefill_export               prompts prefilled for other engines
kv_receive                   the waiting side of such a transfer
disagg_http                  its HTTP protocol
bodies                       fields of requests
calibration                  step times
tokens                       text, tokens and block keys
replica                      the model in real time
http, metrics, kv_publisher  external interfaces
shapes                       response formats of vLLM's APIs
zoo                          other kinds of engine to simulate
command                      the command line
"""
