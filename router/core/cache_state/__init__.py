"""Cached blocks of every replica: an estimate from our own traffic, the engines' own events, and the confidence in
both.

holder_bitmap    map from block key to its holders
prefix_index     estimated blocks from our own traffic
lru              order of last use of one holder's blocks
speculative      estimated blocks of open leases
event_index      blocks that replicas report by events
event_state      state and grade of one replica's reports
engine_blocks    blocks of one engine by its hashes
expected_blocks  held and expected blocks of one key
tier_blocks      blocks in tiers below the GPU
tier_index       replicas with tiers and their shared stores
chunk_width      width of the chunks in which tiers store blocks
calibration      predicted against actual cached tokens
event_lag        events that arrive later than their answer
"""
