"""Placement policies raced in virtual time: a discrete-event simulation without sockets, behind `loadtest simulate`.

    turns      requests, prepared once and asked of every row
    events     KV events on their way to the routers
    workloads  named workloads: traces and generators, a seed, a load
    replicas   the engine model of `loadtest engine`, stepped by a virtual clock
    placing    the router in front of them: the real `router.core`, with a rule in place of its policy
    rules      what others do, restated from their formulas; one file each, one line in a table
    world      the events: arrivals, answers, probes, faults
    figures    what a run comes to, as a row
    race       scenarios x loads x seeds x policies, in several processes
    claims     what must be seen of `warm` in the rows; baseline: an earlier `warm`
    sweep      the constants of `warm`, each over an order of magnitude
    tables     the race for a terminal and for a page; charts: as pictures

What it leaves out is said in loadtest/README.md.
"""
