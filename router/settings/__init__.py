"""Every setting, the files that they name, secrets, TLS, API keys."""
