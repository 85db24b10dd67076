"""A simulated replica: vLLM's HTTP and KV events over a model of its scheduler.

model      continuous batching, in simulated seconds    step, request  what goes into the model and comes out
decoding   the sequences that decode                    kv_pool        KV blocks and their prefix cache
loading    the sequences that wait for loads            host_tier      CPU memory behind the KV blocks
peers      what engines send each other from there
legs       prompts prefilled for other engines to decode: arriving waits for them, pairs has them over HTTP
calibration  how long steps take                        tokens         text, tokens and block keys
replica    the model in real time                       http, metrics, kv_publisher  its outside
shapes     answers of vLLM's APIs                       zoo            other engines to resemble
command    the command line
"""
