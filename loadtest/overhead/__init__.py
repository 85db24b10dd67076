"""What routers cost beside each other: CPU and time per request and per chunk."""
