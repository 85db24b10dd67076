"""How well it is foretold when a prompt is asked for again: forecasts held against the recorded sessions."""
