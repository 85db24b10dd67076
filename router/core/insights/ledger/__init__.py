"""Sums over all requests: by time (timeline), template (branches), kind (groups) and difference (losses), and of the
last minutes by replica and tenant (traffic). Advice from these sums."""
