"""Whose turn it is: windows, the queue, rates, who is held back, who comes again."""
