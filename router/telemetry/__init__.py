"""What is counted, logged and traced. Nothing here decides anything, and no line, series or span has text of a prompt,
of an answer or of a key.

record          what is known of one request; all else is made of it when the request ends
catalogue       names of everything that is counted
tallies         counters and histograms, made of series; metrics/ renders them for Prometheus, pushing sends them
gen_ai, epp     the same under OpenTelemetry's names and those of endpoint pickers
engine_count    what engines count themselves of answers that do not tell
process_counts  what all processes of one router have counted; stalls is how late their event loops are
logs            log lines, which log_output takes from the logging module and log_writer writes in a thread
spans           what a trace is made of; tracing exports it, trace_context reads and writes W3C headers
build           which build runs: version, native code or not, commit
envelope        what a document of measurements says of its origin
"""
