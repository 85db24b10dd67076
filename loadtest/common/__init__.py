"""What instruments share: processes, clients, traces, reports, flags, other makers' routers."""
