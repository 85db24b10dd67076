"""Small models learned from answers: prefill and step times, reuse, lengths, bytes per token."""
