"""Race of placement policies in virtual time: a discrete-event simulation without sockets.

    engine     events: arrivals, answers, probes, faults; replicas of the engine model under a virtual clock
    scenarios  named workloads: traces and generators, a seed, a load
    policies   policies of other routers, restated from their formulas, one file each; bounds: unreachable upper bounds
    results    the race, its claims, figures and tables; sweep: the constants of `warm`
    command    the command line; options: its flags

The router before these replicas is the real `router.core`, with one of these policies. Limits of the simulation
are listed in docs/evidence/simulation.md.
"""
