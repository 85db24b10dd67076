"""The instruments: a simulated replica, a trace replayer, and what they share. Not imported by the router."""
