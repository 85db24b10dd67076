"""Metrics, logs and traces. This package makes no decision. No log line, series or span contains text of a prompt, of
an answer or of a key.

    request_record   facts of one request; metrics, logs and traces are made from it when the request ends
    catalogue        names of all counters and histograms
    counters         counters and histograms, made of series; metrics/ renders them for Prometheus
    engine_hit_rate  engines' own cache counters, applied to answers without a count of cached tokens
    process_totals   totals of the data planes; loop_lag measures the delays of the event loop
    logs             log lines; log_queue writes them in a thread
    spans            spans of a trace; tracing exports them, trace_context reads and writes W3C headers
    build            the running build: version, native code or not, commit
    report_header    origin of a document of measurements
"""
