"""Sums over all requests: by time (timeline), template (branches), kind (groups) and difference (losses). Advice from
these sums."""
