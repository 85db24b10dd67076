"""The instruments, a room each; `python -m loadtest NAME` runs one. The router imports none of them.

common     what instruments share                   engine    a simulated replica behind vLLM's HTTP
replay     a trace over HTTP; the demo              simulate  placement policies raced in virtual time
overhead   what routers cost beside each other      observe   what can be seen, and by whom
faults     what clients see when things go wrong    cost      what our router costs alone
agree      the simulation held against HTTP         evidence  all measurements, part by part
kernels    times of a real GPU                      forecasts when prompts are asked for again
pages      documents rendered from what instruments wrote
"""
