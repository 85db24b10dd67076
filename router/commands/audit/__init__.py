"""Request logs read offline: the observatory's findings before there is a router.

lines     files to lines
requests  a line to a request, in any of several shapes
counting  requests through the memory of texts into the ledger, as the router does it
findings  what came of it, as rows
showing   rows as text
"""
