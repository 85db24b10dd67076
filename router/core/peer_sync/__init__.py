"""Exchange of state between routers, so that several routers place requests as one.

`PeerSyncCore` encodes the state that only this router has into messages, and applies the messages of others. The
transport of the bytes is not part of this package. It keeps the order of a router's messages. If some are missing, the
complete state of their router replaces them.
"""
