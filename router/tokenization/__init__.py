"""Token ids of a request, identical to those of the engine. This package never fails or delays a request: a prompt
without ids in time is placed by estimate.

request_tokens  the ids of a request, and their keys
encoder         chat template and tokenizer, in threads; ask_engine is the interface of a replica's own /tokenize
templates       a model's chat template, rendered in a sandbox; traits is what engines read from it
tokenizers      text to ids; growing remembers those of the beginnings of texts
trust           comparison of the ids with replicas' ids, on the texts of probes
extra           libraries that are imported only if they are needed
"""
