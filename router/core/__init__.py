"""The thinking part of warmroute: state in, decision out.

Nothing here awaits, reads a clock, opens a socket or writes a log; `now_s` and random numbers come in as
arguments. So every decision can be tested without a loop, replayed, and raced in virtual time.
"""
