"""The nouns that all rooms speak in: replicas, requests, placements, misses. Nobody changes one."""
