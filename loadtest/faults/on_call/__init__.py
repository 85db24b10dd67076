"""First signs of nine troubles for the person on call, `python -m loadtest faults --on-call`.

staged_cluster  five simulated replicas behind hops, a router, agents
troubles        the nine troubles, and the words that name the cause of each
signs           rows of the dashboard, lines of `warmroute top --once`
alerts          the chart's rules, evaluated over scraped metrics
watch           one trouble: quiet time, the trouble, and its signs
report          rows and table
attention.mjs   the dashboard's own modules, run by node
"""
