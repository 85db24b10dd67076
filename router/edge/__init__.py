"""Faces clients: the life of one request, read, placed, called, relayed, told."""
