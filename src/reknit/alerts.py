"""Alerts: what deserves one, and how it reaches somebody.  `Alerts` is a sink, see `reknit.sinks`."""

from reknit.monitor.alerts.grouping import Told
from reknit.monitor.alerts.rules import (
    DEFAULTS,
    Alert,
    AlertRule,
    Failures,
    LongSave,
    NoCommit,
    Retries,
    SlowWrite,
    StorageFull,
    Stragglers,
    Watch,
)
from reknit.monitor.alerts.sink import Alerts
from reknit.monitor.alerts.ways import Command, Email, Log, Webhook

__all__ = [
    "DEFAULTS",
    "Alert",
    "Alerts",
    "Command",
    "Email",
    "Failures",
    "Log",
    "LongSave",
    "NoCommit",
    "Retries",
    "AlertRule",
    "SlowWrite",
    "StorageFull",
    "Stragglers",
    "Told",
    "Watch",
    "Webhook",
]
