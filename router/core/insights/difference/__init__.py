"""First difference of two prompts, and its kind.

compare           position and kind of the first difference, and the bytes that repeat after it
first_difference  tool or message of the difference, and the change in it
text_change_kind  kind of a change in a text
volatile_values   dates, identifiers and numbers, recognised by their form
json_changes      first difference of two JSON values, or of two lists of tools
json_paths        path of a place in the request's body
text_overlap      common parts of two texts
"""
