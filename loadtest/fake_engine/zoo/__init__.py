"""Engines that differ from the dense one: `python -m loadtest engine --like NAME`.

member       definition of a member: its deviations from the dense engine, as data
members      the members by name, each with the source of its deviations
vllm         external interface of vLLM: pages, errors, responses by path; sleep mode
sglang       the same of SGLang: /server_info, errors, streams
pages        metrics pages as text
faces        the external interface of a member by its family
kv_encoding  KV events by family, with groups
apis         responses of the Messages, Responses, transcription and speech APIs
"""
