"""Simulated replica: vLLM's HTTP API and KV events on top of a model of vLLM's scheduler.

model        continuous batching, in simulated seconds    step, request  inputs and outputs of the model
decoding     sequences that decode                        kv_pool        KV blocks and their prefix cache
loading      sequences that wait for tier loads           host_tier      CPU memory tier of the KV blocks
peers        P2P KV transfers between those tiers
legs         prompts prefilled for other engines: `arriving` is the waiting side, `pairs` the HTTP protocol
calibration  step times                                   tokens         text, tokens and block keys
replica      the model in real time                       http, metrics, kv_publisher  external interfaces
shapes       response formats of vLLM's APIs              zoo            other kinds of engine to simulate
command      the command line
"""
