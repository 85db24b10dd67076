"""Every setting, and the files that settings name. Where values come from is commands/loading.

schema     the settings, with their defaults and reasons
reloading  which of them may change while the router runs
keys       API keys and tenants
secrets    secrets, in settings or files
tls        TLS contexts
contents   what is in the files that settings name, as the supervisor hands it to its children
descriptors  how many files the process may open, and what of them is clients'
networks   where replicas may be that are added at run time
pairs      settings that are pairs written as one string
hints      words for mistakes: which right name was meant
"""
