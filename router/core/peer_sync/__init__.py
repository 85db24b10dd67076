"""Exchange of state between routers, so that several routers place requests as one.

`PeerSyncCore` encodes the state that only this router has into messages, and applies the messages of others. The
transport of the bytes is not part of this package. Each message contains absolute sums, so the next message corrects
one that was lost, repeated, or sent before a restart.
"""
