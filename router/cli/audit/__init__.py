"""Request logs read offline: the observatory's findings before a router is deployed.

report        the command
reader        reads lines of files
log_requests  makes a request of a line, in any of several shapes
router_log    reads lines of a router's own log
counts        puts requests through the memory of texts into the ledger, as the router does
findings      the results, as rows
tables        the rows as text
"""
