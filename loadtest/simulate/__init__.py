"""Race of placement policies in virtual time: a discrete-event simulation without sockets.

    world      events: arrivals, answers, probes, faults; replicas of the engine model under a virtual clock
    scenarios  named workloads: traces and generators, a seed, a load
    rules      rules of other routers, restated from their formulas, one file each; bounds: unreachable upper bounds
    results    the race, its claims, figures and tables; sweep: the constants of `warm`

The router before these replicas is the real `router.core`, with a rule in place of its policy. Limits of the simulation
are listed in docs/evidence/simulation.md.
"""
