"""The wall of our own attacks: a function of bytes for every parser of foreign bytes, and what drives them.

`python -m tests.attack` runs all of them long; `test_attack.py` and `test_cuts.py` run a short part that is the same
each time. CONTRIBUTING.md says how a parser gets its target.
"""
