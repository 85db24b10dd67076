"""Sums over all requests: by time (timeline), template (branches), kind (groups), difference (losses); and advice."""
