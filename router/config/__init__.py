"""Settings of the router, and the files that settings name. cli/config_loader reads their values from all sources.

schema     the settings, with their defaults and reasons
reloading  settings that may change while the router runs
keys       API keys and tenants
secrets    secrets, in settings or files
tls        TLS contexts
contents   contents of the files that settings name, as the supervisor passes them to its children
descriptors  limit of open files of the process, and the part of it for clients
networks   permitted addresses of replicas that are added at run time
pairs      settings that are pairs written as one string
hints      messages for mistakes, with the nearest valid name
"""
