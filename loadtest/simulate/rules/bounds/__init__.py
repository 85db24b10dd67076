"""Rows that no router can be: they know what is held, or share one cache."""
