"""The simulation against HTTP, and ours beside other makers' routers."""
