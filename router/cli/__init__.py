"""The commands `serve`, `check-config`, `make-key`, `top`, `explain` and `audit` of `warmroute`.

main     the command line
loading  settings from all sources, checked
extras   the message for a missing library
parsing  command lines that report their errors with hints
top/     the dashboard in a terminal
explain/ outcome of one request, in words
audit/   request logs, read offline
"""
