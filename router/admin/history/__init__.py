"""What was: the last decisions and the figures of the last hour in memory, and more of both in a file if one is named.

history    what the hub tells of every request, and what pages ask
pages      what is asked of the past, and how it is answered
filters    which decisions are wanted
intervals  figures of five seconds each, that add up to longer ones
keeper     the thread that writes and reads the file, and goes on without it where it must
file       the file itself: SQLite, bounded in bytes and in days
"""
