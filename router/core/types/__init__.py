"""Types that all packages share: replicas, requests, placements, misses. Instances stay unchanged after creation,
except for a few fields that hold later results."""
