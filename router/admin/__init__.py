"""Pages of the control plane. No code of this package is on a request's path.

listener          the admin listener
access_control    its access control
page_table        a call, an answer, a route, the table of routes: the parts that pages are made of
pages             health, readiness, metrics, models, and pages for operators
history/          past decisions and figures, in memory and in a file
decision_rows     decisions as rows of pages
replica_rows      replicas as rows of pages, and their comparison with peers
query_params      validation of a page's parameters
insights_pages    pages of the observatory
added_replicas    adding and removing replicas at run time
drain             moving a replica's streams to others
prewarm_endpoint  warming replicas now
openapi/          parameters and answers of all paths of both listeners
runbook/          instructions for incidents
dashboard/        the page that shows the other pages' data
"""
