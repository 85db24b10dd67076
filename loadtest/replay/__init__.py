"""A trace over HTTP: `run` sends it and makes the row, `command` is its command line, `demo` compares two policies,
`faces` the two faces, and `routers` one router with several."""
