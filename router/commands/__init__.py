"""What people type: `warmroute serve`, `check-config`, `make-key`, `top` and `audit`.

main     the command line
loading  settings from all sources, checked
extras   what is said where a library is missing
parsing  command lines that say what is wrong with them
top/     the dashboard in a terminal
audit/   request logs, read offline
"""
