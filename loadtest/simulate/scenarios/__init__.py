"""Named workloads: `recorded`, `generated`, `crowded` and `eventful` make those of the race, `drawn`, `mixed`,
`tiered`, `pulled` and `split` those beside it; `table` has them by name and load, `scenario` is what they make."""
