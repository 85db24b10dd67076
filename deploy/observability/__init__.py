"""Dashboards and alert rules as Python, the source of the chart's `files/dashboards` and `files/rules.yaml`.

    dashboards  the panels of each dashboard, and their meaning
    grafana     panels as Grafana's JSON
    rules       recording rules and alerts
    scene       replicas, a router, Prometheus and trouble, on this machine
    picture     a dashboard as a picture, from data that Prometheus scraped

`python -m deploy.observability` writes all files; with `--check` it lists the files that differ from its output.
"""
