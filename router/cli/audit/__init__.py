"""Request logs read offline: the observatory's findings before a router is deployed.

report        the command
reader        reads records of files: lines, or objects of a JSON array
log_formats   table of the formats, one of which reads each record
engine_logs, payload_logs, trace_exports
              readers of formats, by the software that writes them
log_requests  makes a request of a line in JSON, in any of several shapes
router_log    reads lines of a router's own log
counts        puts requests through the memory of texts into the ledger, as the router does
findings      the results, as rows
tables        the rows as text
"""
