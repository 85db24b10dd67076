"""Rows of the fault matrix: a fault and its required outcome.

early, endings              before and within a response
health, drain, disconnects  replicas, the router, clients that end
overload                    more load than engine capacity
abuse, bodies, memory       limits that clients must not exceed
tenants                     one of eight is hostile
neighbours                  effects of one client on another
zoo                         other kinds of engines
"""
