"""What is counted, logged and traced: the record of a request, metrics, log lines, spans."""
