"""Request logs read offline: the observatory's findings before a router is deployed.

report    the command
lines     reads lines of files
requests  makes a request of a line, in any of several shapes
served    reads lines of a router's own log
counting  puts requests through the memory of texts into the ledger, as the router does
findings  the results, as rows
tables    the rows as text
"""
