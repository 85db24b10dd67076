"""Where two prompts first differ, and how.

compare           where they first differ, of which kind that is, and what repeats behind it
first_difference  in which tool or message that is, and what happened there
rewording         of which kind a change of a text is
shapes            dates, identifiers and numbers, told by how they look
json_changes      where two JSON values, or two lists of tools, first differ
json_paths        what a place is called in the request's body
overlap           what two texts have in common
"""
