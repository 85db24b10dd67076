"""How requests become token ids: templates and tokenizers of the served models, behind router.tokens.encoder."""
