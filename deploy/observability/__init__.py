"""Dashboards and alert rules as Python: what `deploy/grafana`, `deploy/prometheus` and the chart's copies are made of.

    dashboards  what is on each dashboard, and what each panel means
    grafana     panels to Grafana's JSON
    rules       recording rules and alerts
    scene       replicas, a router, Prometheus and trouble, on this machine
    picture     a dashboard as a picture, from what Prometheus scraped

`python -m deploy.observability` writes all files; with `--check` it says which of them are not what it would write.
"""
