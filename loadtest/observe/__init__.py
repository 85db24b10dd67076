"""What can be seen, and by whom.

story  agents whose release dates their prompts (agents), and what the observatory says of that
sidechannel  whether a tenant finds out by time what another tenant has asked
"""
