"""What a race comes to: rows, claims, tables, charts, sweeps, ladders."""
