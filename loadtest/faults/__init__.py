"""What clients see when replicas go wrong: rows of faults, a bench, a judge."""
