"""Small models that are learned from answers: prefill and step times, reuse, lengths, bytes per token."""
