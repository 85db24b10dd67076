"""Placement: candidates and their prices, the policies that choose, receipts, and the lessons of finished answers."""
