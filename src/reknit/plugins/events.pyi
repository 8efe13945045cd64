"""The names that a sink of events may import; `events.py` imports each one when it is used."""

from reknit.locations import Sink as Sink
from reknit.monitor.records import DroppedRecord as DroppedRecord
from reknit.monitor.records import PhaseRecord as PhaseRecord
from reknit.monitor.records import StorageRecord as StorageRecord
