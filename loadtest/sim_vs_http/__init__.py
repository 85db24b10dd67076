"""The simulation against HTTP, and our router beside other makers' routers.

cases       slices and rows to compare
slices      the same requests in the simulation
over_http   over HTTP
race_table  scenarios of the race over HTTP
report      rows and goals
command     command line
"""
