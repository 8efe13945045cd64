"""Alerts: their rules, and where they are sent.  `Alerts` is a sink, see `reknit.sinks`."""

from reknit.monitor.alerts.alert_groups import GroupedAlert
from reknit.monitor.alerts.alert_rule import Alert, AlertRule, Watch
from reknit.monitor.alerts.alert_sink import Alerts
from reknit.monitor.alerts.channels import Log, Webhook
from reknit.monitor.alerts.phase_rules import DEFAULTS, Failures, LongSave, NoCommit, Stragglers
from reknit.monitor.alerts.store_rules import CoolingBehind, Retries, SlowWrite, StorageFull

__all__ = [
    "DEFAULTS",
    "Alert",
    "Alerts",
    "CoolingBehind",
    "Failures",
    "GroupedAlert",
    "Log",
    "LongSave",
    "NoCommit",
    "Retries",
    "AlertRule",
    "SlowWrite",
    "StorageFull",
    "Stragglers",
    "Watch",
    "Webhook",
]
