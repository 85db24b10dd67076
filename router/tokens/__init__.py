"""A request's token ids, as the engine would make them: chat template and tokenizer, off the event loop."""
