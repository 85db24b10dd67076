"""Exchange of state between the routers of one fleet, through a store that they share: Redis or Valkey.

All of it runs in the background. No request waits for it, and no request fails because of it.

addresses  address of the store, from its URL; checks validates its settings
names      resolves the store's name outside the event loop's thread pool
session    interface of an open session, and its failures
store      a session with Redis or Valkey
wire       reads a connection of it as bytes arrive
frames     encoding of a message
sides      interfaces of the components that use the link
link       lifecycle of the link: sessions, whole or alone, keeping
saying     schedule and content of published messages
hearing    filter for received messages, and dispatch of their parts
shared     rates, evidence and owners, as messages carry them
tenants    one rate for each tenant over all routers
deaths     replicas that several routers have found dead
handing    transfer of a router's state to another that has just started
"""
