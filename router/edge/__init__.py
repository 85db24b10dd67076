"""Faces clients as their HTTP proxy: the life of one request, read, placed, called, relayed, told.

This room asks a hub through `placer.Placer` and never imports `router.hub` (a contract in pyproject.toml), so that it
is the same with one process and with many. What a request says is read in `reading`, as for the other face.

edge          owns the parts and the listener
routes        where a request goes: to an engine, one of our own pages, or nowhere
preflights    what engines let pages in browsers do, where we have no list of our own
proxy         the story of one request that goes to an engine
attempts      placing and calling until an answer has begun, within a retry_budget
legs          calling two replicas where one prefills what another one decodes
early         streams whose first events come of no work
continuing    streams that go on on another replica when theirs breaks or is about to leave
relay         bytes from engine to client
"""
