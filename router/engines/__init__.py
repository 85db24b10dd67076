"""Which engines there are and what they say of themselves. The only room that talks to engines besides a request's own
call (http/) and prewarming; what it hears goes to the Router.

discovery/  which replicas there are
probe       their health, models and load
ranks       how many data-parallel ranks a server has
kv_events/  what their caches hold, by their KV events
announce    have a replica say again what it holds
peers       whether engines take orders of their peers, so that they can be pulled from
hands       how engines hand over what they have prefilled; pairs warms two of them before requests come
fetch       how a page of an engine is asked for
"""
