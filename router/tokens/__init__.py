"""A request's token ids, as the engine would make them. Nothing here may fail or delay a request: a prompt whose ids
are not known in time is placed by estimate.

request_tokens  the ids of a request, and their keys
encoder         chat template and tokenizer, in threads; ask_engine is a replica's own /tokenize
templates       a model's chat template, rendered in a sandbox; traits is what engines read from it
tokenizers      text to ids; growing remembers those of the beginnings of texts
trust           whether the ids can be trusted, compared with replicas' on the texts of probes
extra           libraries that are imported only if they are needed
"""
