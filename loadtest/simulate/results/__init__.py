"""Results of a race.

race, ladder                                               runs of many worlds, and llm-d's stages
metrics                                                    the row of a run, medians over seeds
claims, baseline                                           claims, also against an earlier `warm`
tables, charts                                             output for people
sweep                                                      other values of the constants of `warm`
deadlines, predictions, tiers, pulls, split, multi_router  one comparison each, by a flag of the same name
linked_replicas                                            common parts of pulls and split
zoo                                                        the race on other kinds of engines
"""
