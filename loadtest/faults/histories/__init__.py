"""Histories of four routers that share a real store, and the model for the check of each history.

`python -m loadtest faults --histories SECONDS` draws faults from a seed:

- Routers are stopped, killed and restarted.
- Networks are cut in either direction.
- The store is emptied, frozen, full or killed, or fails over to its replica.
- An engine goes away.
- Wall clocks differ by 5 s.
"""
