"""Observed client behaviour under failures of replicas, clients and the network, judged against goals.

cases           fault cases, a file per kind of goal
upstream        replica with faults on demand
bench           router with such replicas
judge           honesty check of a stream's end
abusive_client  tenant that exhausts resources
hostile_store   store that floods subscribers
matrix          goals and their rows
soak            faults for hours
histories       random histories of faults and requests
curve           answers over time during a fault
report          tables
command         command line
"""
