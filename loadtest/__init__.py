"""The benchmarks, one package each; `python -m loadtest NAME` runs one. The router imports none of them.

common     modules that benchmarks share            engine    a simulated replica behind vLLM's HTTP
replay     a trace over HTTP; the demo              simulate  placement policies raced in virtual time
overhead   CPU cost of routers beside each other    observe   information visible to observers
faults     effects of faults on clients             cost      CPU and memory cost of our router alone
agree      the simulation compared with HTTP        evidence  all measurements, part by part
kernels    times of a real GPU                      forecasts the next use of prompts
pages      documents rendered from the output of benchmarks
"""
