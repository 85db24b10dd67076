"""What earlier prompts looked like, and whom a prompt is compared with.

texts      what earlier prompts said: a bounded radix tree of texts
anchors    what a prompt is recognised by where its beginning has changed
templates  prefixes that conversations share, learned as they fork
watcher    which conversation and template a prompt is of, and what it is to be compared with: sightings
glance     the same in microseconds, for nearly all prompts
suspect    a prompt that takes more than a glance, and what it will be found by
relatives  whom such a prompt is compared with
assumed    what the last comparisons found, for prompts that are not compared
"""
