"""Small models: prefill speed, reuse, answers, bytes per token."""
