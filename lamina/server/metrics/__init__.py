"""Metrics, health and the dashboard for operators."""
