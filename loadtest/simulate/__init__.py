"""Placement policies raced in virtual time: a discrete-event simulation without sockets.

    world      the events: arrivals, answers, probes, faults; replicas of the engine model under a virtual clock
    scenarios  named workloads: traces and generators, a seed, a load
    rules      what others do, restated from their formulas, one file each; bounds: what nobody can beat
    results    the race, its claims, figures and tables; sweep: the constants of `warm`

The router before these replicas is the real `router.core`, with a rule in place of its policy. What the simulation
leaves out is said in docs/evidence/simulation.md.
"""
