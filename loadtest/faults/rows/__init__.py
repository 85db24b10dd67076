"""One goal a file: what happens, and what must come of it."""
