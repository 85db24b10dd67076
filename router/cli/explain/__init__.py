"""`warmroute explain ID`: the outcome of one request and the reasons for it, in words.

asking   asks the admin listener of a running router
words    makes sentences of the row that it answers with
"""
