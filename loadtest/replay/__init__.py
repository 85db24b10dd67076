"""A trace over HTTP, and the demo that is made of it."""
