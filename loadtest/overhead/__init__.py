"""Overhead."""
