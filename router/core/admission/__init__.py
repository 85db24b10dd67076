"""Whose turn it is: windows, queue, rates, who is held back."""
