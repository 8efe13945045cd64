"""Alerts: what deserves one, and how it reaches somebody.  `Alerts` is a sink, see `reknit.sinks`."""

from reknit.monitor.alerts.base import Alert, AlertRule, Watch
from reknit.monitor.alerts.grouping import Told
from reknit.monitor.alerts.rules import DEFAULTS, Failures, LongSave, NoCommit, Stragglers
from reknit.monitor.alerts.sink import Alerts
from reknit.monitor.alerts.stores import CoolingBehind, Retries, SlowWrite, StorageFull
from reknit.monitor.alerts.ways import Command, Email, Log, Webhook

__all__ = [
    "DEFAULTS",
    "Alert",
    "Alerts",
    "Command",
    "CoolingBehind",
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
