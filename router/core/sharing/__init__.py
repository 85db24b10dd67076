"""Several routers decide as one: what this router knows and the others do not, as messages, and what they say.

`Sharing` says and hears; the bytes between routers are somebody else's business. Each message has absolute sums, so
that a message lost, repeated, late, or from before a restart is healed by the next one.
"""
