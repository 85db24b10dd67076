"""Disaggregated prefill: one replica prefills a prompt, and another one decodes it.

No class here is used unless the setting `disagg.kv_connector` registers `PairDisaggregator` with the Router.

    pair_disaggregator  the Disaggregator of core/placement/disaggregator.py: plan, open, finish, free places
    planner             decision between one replica and a pair
    leases              the leases of both stages, from placement to the end
    member_stages       the stages in the state of the replica at which they run
    pairs               pairs of replicas, their state and transfer times
    prefill_members     replicas that take prefill stages only
    bodies              bodies of the requests of both stages, for each KV connector
    prefill_hosts       hosts that a prefill replica may name as the source of its blocks
"""
