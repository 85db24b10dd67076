"""Rows that no router can reach: `clairvoyant` knows future requests, `one_cache` shares one cache, `truth` has the
engines' true state."""
