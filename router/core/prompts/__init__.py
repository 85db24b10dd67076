"""Canonical bytes, template input, chains of keys."""
