"""Named workloads.

- `recorded`, `generated`, `contention` and `disruptions` make those of the race
- `random_workloads`, `priority_mix`, `tiers`, `p2p` and `split` make the others
- `registry` has them by name and load, and `scenario` has the type that they make
"""
