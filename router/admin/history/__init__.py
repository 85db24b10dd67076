"""The past: the last decisions and the figures of the last hour in memory, and more of both in a file if one is
configured.

request_history  stores every request that ended, and answers queries of pages
history_pages    pages of the past
query_filters    selection of decisions
intervals        figures of five seconds each, that add up to longer ones
writer           the thread that writes and reads the file, and continues without it if it fails
file             the file itself: SQLite, bounded in bytes and in days
former_values    replaces values of earlier versions
"""
