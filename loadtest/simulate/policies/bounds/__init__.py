"""Rows that no router can reach. `clairvoyant` knows future requests, and `shared_cache` shares one cache.
`ground_truth` is the engines' true state, for both."""
