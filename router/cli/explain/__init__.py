"""`warmroute explain ID`: the outcome of one request and the reasons for it, in words.

client  asks the admin listener of a running router
prose   makes sentences of the row that it answers with
"""
