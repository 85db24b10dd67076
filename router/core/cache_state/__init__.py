"""Cached blocks of every replica: an estimate from our own traffic, the engines' own events, and the confidence in
both.

masks          map from block key to its holders
estimate       estimated blocks from our own traffic
recency        order of last use of one holder's blocks
unproven       estimated blocks of open leases
knowledge      blocks that replicas report by events
reported       state and grade of one replica's reports
engine_blocks  blocks of one engine by its hashes
claims         held and expected blocks of one key
tiers          blocks in tiers below the GPU
tiered         replicas with tiers and their shared stores
chunks         width of the chunks in which tiers store blocks
selfcheck      predicted against actual cached tokens
lateness       events that arrive later than their answer
"""
