"""The hub's own pages. Nothing here is on a request's path.

listener     the admin listener; guard says who may use it
calls        what a page is: a call, an answer, a route, the table of routes
pages        health, readiness, metrics, models, and what an operator wants to see
history/     past decisions and figures, in memory and in a file
rows         decisions as rows of pages
parameters   which parameters a page takes
observatory  what the observatory knows
replicas     adding and removing replicas at run time; draining tells one to send its streams elsewhere
prewarm      warming replicas now
openapi/     what all paths of both listeners take and answer
runbook/     what to do at three in the morning
dashboard/   the page that shows all that
"""
