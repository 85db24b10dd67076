"""Token ids of a request, identical to those of the engine. This package never fails or delays a request: a prompt
without ids in time is placed by estimate.

request_tokens       the ids of a request, and their keys
encoder              chat template and tokenizer, in threads; engine_tokenize calls a replica's own /tokenize
chat_templates       a model's chat template, rendered in a sandbox
template_traits      properties that engines read from a chat template
incremental          ids of the beginnings of texts, kept for the next text
tokenizers           text to ids
verifier             comparison of the ids with replicas' ids, on the texts of probes
optional_tokenizers  libraries that are imported only if they are needed
"""
