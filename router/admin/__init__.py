"""Pages of the control plane. No code of this package is on a request's path.

listener     the admin listener; guard is its access control
calls        a call, an answer, a route, the table of routes: the parts that pages are made of
pages        health, readiness, metrics, models, and pages for operators
history/     past decisions and figures, in memory and in a file
rows         decisions as rows of pages
parameters   validation of a page's parameters
observatory  pages of the observatory
replicas     adding and removing replicas at run time; draining moves a replica's streams to others
prewarm      warming replicas now
openapi/     parameters and answers of all paths of both listeners
runbook/     instructions for incidents
dashboard/   the page that shows the other pages' data
"""
