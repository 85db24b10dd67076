"""What people type: `warmroute serve`, `check-config`, `make-key`, `top` and `audit`.

main     the command line
loading  settings from all sources, checked
top      the dashboard in a terminal
audit/   request logs, read offline
"""
