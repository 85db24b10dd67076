"""`warmroute explain ID`: what became of one request, and why, in words.

asking   asks the admin listener of a running router
words    makes sentences of the row that it answers with
"""
