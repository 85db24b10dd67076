"""Modules that benchmarks share.

processes          children: routers, replicas
usage              CPU and memory of a process
rivals             other makers' routers
client             requests and engines' counters
answers            answers of fake engines
answer_limits      `max_tokens` of requests
networks           simulated network delay
traces             recorded requests
in_process_router  the router's placing, alone
svg                rows as a picture
report             rows, tables, charts, JSON
flags              numbers on command lines
runs               lists of block ids
envoy              a real Envoy with a picker
stores             a store that routers share
"""
