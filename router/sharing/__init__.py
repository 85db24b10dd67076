"""What several routers of one fleet tell each other, through a store that they share: Redis or Valkey.

Everything here is in the background; a request neither waits for it nor fails by it.

addresses  where the store is, as a URL says; checks is what is wrong with its settings
names      the store's name, asked for without a thread of the event loop's
session    what is asked of an open session, and what may go wrong
store      a session with Redis or Valkey
wire       a connection of it, read as its bytes come
frames     a message, as bytes
sides      whose words the link carries
link       the life of the link: sessions, whole or alone, keeping
saying     when something is said, and what
hearing    who is heard, and where each part of a message goes
shared     rates, evidence and owners, as messages carry them
tenants    one rate for each tenant over all routers
deaths     replicas that several routers have found dead
handing    what one router knows, handed over to another that has just started
"""
