"""The hub's own pages, their guard, the dashboard."""
