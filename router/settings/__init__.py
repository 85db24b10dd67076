"""Every setting, the files they name, secrets, TLS, API keys."""
