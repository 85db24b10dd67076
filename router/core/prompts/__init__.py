"""Canonical bytes of a prompt, the input of chat templates, chains of keys."""
