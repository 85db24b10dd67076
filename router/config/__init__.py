"""Settings of the router, and the files that settings name. cli/config_loader reads their values from all sources.

schema            the settings, with their defaults, reasons, and marks of those that a reload applies
runtime           settings resolved: keys, secrets and certificates read from their files and checked
reload            reads the settings again while the router runs
former_settings   former names of settings
api_keys          API keys and tenants
secrets           secrets, in settings or files
tls               TLS contexts
file_contents     contents of the files that settings name, as they were checked
fd_limits         limit of open files of the process, and the part of it for clients
allowed_networks  permitted addresses of replicas that are added at run time
url_maps          settings that are pairs written as one string
origins           permitted origins of CORS requests
suggestions       messages for mistakes, with the nearest valid name
"""
