"""What people type: `warmroute serve`, `check-config`, `make-key`, `top`, `explain` and `audit`.

main     the command line
loading  settings from all sources, checked
extras   what is said where a library is missing
parsing  command lines that say what is wrong with them
top/     the dashboard in a terminal
explain/ what became of one request, in words
audit/   request logs, read offline
"""
