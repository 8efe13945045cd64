"""Alerts: their rules, and where they are sent."""
