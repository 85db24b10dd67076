"""Named workloads: `recorded`, `generated`, `crowded` and `eventful` make them, `table` has them by name and load,
`scenario` is what they make."""
