"""Texts of earlier prompts, and the choice of the earlier prompt to compare a prompt with.

texts            bounded radix tree of the texts of earlier prompts
fingerprints     marks by which a prompt is recognised if its beginning has changed
shared_prefixes  prefixes that conversations share, learned as they fork
prompt_tracker   conversation and template of a prompt, and the prompt to compare it with
fast_path        the same in microseconds, for nearly all prompts
diff_candidate   a prompt that needs a longer search, and the marks by which it can be found
related_prompts  the earlier prompt to compare such a prompt with
recent_findings  results of the last comparisons, for prompts that are not compared
"""
