"""Named workloads: recorded, generated, crowded, eventful; `table` has them by name."""
