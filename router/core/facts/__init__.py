"""The nouns: replicas, requests, placements, misses."""
