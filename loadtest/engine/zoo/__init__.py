"""Engines that differ from the dense one: `python -m loadtest engine --like NAME`.

member     what a member is: its deviations from the dense engine, as data
members    the members by name, each with the source that its deviations were read in
vllm       how a member looks from outside: pages, errors, answers by path; sleep mode
sglang     the same of SGLang: /server_info, errors, streams
pages      metrics pages as text
faces      the outside of a member by its family
kv_encoding  KV events by family, with groups
apis       answers of the Messages, Responses, transcription and speech APIs
"""
