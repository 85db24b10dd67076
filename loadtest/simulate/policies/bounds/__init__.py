"""Rows that no router can reach. `clairvoyant` knows future requests, and `one_cache` shares one cache. `truth` is the
engines' true state, for both."""
