"""Comparison of router costs: CPU and time per request and per chunk.

command, options                                  the run and its flags
load, bodies                                      the client and its requests
report                                            medians, goals, a chart
upstream, answers                                 replicas with negligible cost
extremes, observatory, picker, failover, sharing  rows of our router alone
profile                                           our router under cProfile
"""
