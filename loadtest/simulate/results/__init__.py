"""What a race comes to.

race, ladder    runs of many worlds, and llm-d's stages    figures           the row of a run, medians over seeds
claims, baseline  what must hold, also against before      tables, charts    how people read it
sweep           other values of the constants of `warm`
deadlines, predictions, tiers, pulls, split, several  a question each, by a flag of its name
"""
