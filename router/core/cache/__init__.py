"""Cached blocks of every replica: an estimate from our own traffic, the engines' own events, and the confidence in
both.

masks          map from block key to its holders, and the longest match of every holder
estimate       estimated blocks from our own traffic, with an LRU per holder
recency        order of last use of one holder's blocks
unproven       estimated blocks of open leases
knowledge      blocks that replicas report by events, and their grade
reported       state and grade of one replica's reports
engine_blocks  blocks of one engine, from its hashes to our keys
claims         held and expected blocks of one key
tiers          blocks in tiers below the GPU
tiered         replicas with tiers, and the stores that they share
chunks         width of the chunks in which tiers store blocks
selfcheck      predicted against actual cached tokens
lateness       events that arrive later than their answer
"""
