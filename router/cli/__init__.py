"""The commands `serve`, `config`, `check-config`, `make-key`, `top`, `explain` and `audit` of `warmroute`.

main                the command line
config_loader       settings from all sources, checked
config_sources      settings in the file and in the environment
effective_settings  effective settings with their sources
optional_deps       the message for a missing library
arguments           command lines that report their errors with hints
top/                the dashboard in a terminal
explain/            outcome of one request, in words
audit/              request logs, read offline
"""
