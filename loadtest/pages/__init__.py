"""Renders documents from what instruments wrote."""
