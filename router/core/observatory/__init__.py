"""Why prompts miss the cache.

texts        what earlier prompts said: a bounded radix tree of texts
marks        what a prompt is recognised by where its beginning has changed
templates    prefixes that conversations share, learned as they fork
watching     which conversation and template a prompt is of, and what it is to be compared with: sightings
glancing     the same in microseconds, for nearly all prompts
looks        a prompt that takes more than a glance, and what it will be found by
relating     whom it is compared with
assuming     what the last comparisons found, for those that are not compared
difference   where two prompts first differ, of which kind that is, and what repeats behind it
finding      in which tool or message that is, and what happened there
rewording    of which kind a change of a text is
shapes       dates, identifiers and numbers, told by how they look
json_changes where two JSON values, or two lists of tools, first differ
locating     what a place is called in the request's body
pieces       what two texts have in common
generations  what is remembered of blocks and prompts, within a strict bound
explain      a placement and a sighting make a breakdown: every token a hit, or a miss with a reason
ledger       what all requests add up to: by time (timeline), template (branches), kind (groups), difference (losses)
advice       what to do about misses
"""
