"""All that measures time or rates, and one table of it."""
