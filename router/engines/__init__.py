"""Which engines there are and what they say."""
