"""Information that an observer can see, and the observers that can see it.

story        agents with a release that dates their prompts (agents), and the observatory's report of it
sidechannel  a tenant that tries to detect another tenant's prompts by time
"""
