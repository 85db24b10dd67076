"""A trace over HTTP: `run` sends it and makes the row, `command` is its command line, `demo` compares two policies.

`frontends` compares the two frontends, and `routers` compares one router with several.
"""
