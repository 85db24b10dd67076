"""Rows that no router can be: `clairvoyant` knows what will be asked, `one_cache` shares one cache, `truth` has the
engines' true state."""
