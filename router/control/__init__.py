"""Control plane: keeps the state of all replicas and makes every placement, for all frontends. It imports no HTTP
client and relays no byte of a response. Frontends call it through `placement_api` only, and it notifies them through
`Frontends`.

control_plane         lifecycle of the control plane, and its notifications
wiring                builds its parts from the settings
replica_lifecycle     replica lifecycle, and the tasks that watch each replica
local_placement       placer for frontends in this process
admission_controller  admission: places a request, queues it or sheds it
readiness             the answer to `/readyz`
unshared              condition of routers that share no state
response_owners       index of stored responses: the replica that made each
peer_routers          link to other routers, if the settings name a store
snapshot              start with the state of an earlier process; snapshot_file stores it, snapshot_builder encodes it
"""
