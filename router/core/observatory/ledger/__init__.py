"""What misses add up to, and advice."""
