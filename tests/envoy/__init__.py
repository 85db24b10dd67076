"""The picker behind a real Envoy: `make test-envoy`."""
