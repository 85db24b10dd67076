"""Agree."""
