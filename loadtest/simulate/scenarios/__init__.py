"""Named workloads.

- `recorded`, `generated`, `crowded` and `eventful` make those of the race
- `drawn`, `mixed`, `tiered`, `pulled` and `split` make the others
- `table` has them by name and load, and `scenario` has the type that they make
"""
