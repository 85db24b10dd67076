"""Exchange of state between the routers of one fleet, through a store that they share: Redis or Valkey.

All of it runs in the background. No request waits for it, and no request fails because of it.

store_url          address of the store, from its URL; validation checks its settings
name_lookup        resolves the store's name outside the event loop's thread pool
session            interface of an open session, and its failures
redis_store        a session with Redis or Valkey; clients finds the server among Sentinels or in a cluster
store_clock        the store's clock, which is common to all routers
frames             encoding of a message; message_auth proves that it is from a router of the fleet
interfaces         interfaces of the components that use the link
peer_link          lifecycle of the link: sessions, connected or not
persistence        data of one router in the store
peers              other routers, and their membership in the fleet
publisher          schedule and content of published messages
message_receiver   filter for received messages and states, and dispatch of their parts
shared_state       rates, evidence and owners, as messages carry them
tenant_rates       one rate for each tenant over all routers
dead_replicas      replicas that several routers have found dead
snapshot_transfer  transfer of a router's snapshot to another that has just started
"""
