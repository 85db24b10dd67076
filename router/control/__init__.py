"""Control plane: holds all knowledge of the replicas and makes every placement; one hub serves all frontends. It
imports no HTTP client and relays no byte of a response. Frontends call it through the `placer` only, and it notifies
them through `Frontends`.

hub           lifecycle of the control plane, and its notifications
assembly      builds its parts from the settings
parts         interface between those parts
roster        replica lifecycle, and the tasks that watch each replica
local_placer  placer for frontends in this process
admitter      admission: places a request, queues it or sheds it
owners        index of stored responses: the replica that made each
sharing       link to other routers, if the settings name a store
warm_start    start with the state of an earlier process; state_file stores that state, knowing encodes it
"""
