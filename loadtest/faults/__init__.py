"""Observed client behaviour under failures of replicas, clients and the network, judged against goals.

rows     fault cases, a file per kind of goal         upstream       replica with faults on demand
bench    router with such replicas                    judge          honesty check of a stream's end
hostile  tenant that exhausts resources               hostile_store  store that floods subscribers
matrix   goals and their rows                         soak           faults for hours
report   tables                                       command        command line
"""
