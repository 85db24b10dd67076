"""The benchmarks, one package each; `python -m loadtest NAME` runs one. The router imports none of them.

common          modules that benchmarks share
fake_engine     a simulated replica behind vLLM's HTTP
replay          a trace over HTTP; the demo
simulate        placement policies raced in virtual time
proxy_cost      CPU cost of routers beside each other
insights        information visible to observers
faults          effects of faults on clients
core_cost       CPU and memory cost of our router alone
sim_vs_http     the simulation compared with HTTP
suite           all measurements, part by part
kernels         times of a real GPU
reuse_forecast  the next use of prompts
data            traces and calibrations
docgen          documents rendered from the output of benchmarks
"""
