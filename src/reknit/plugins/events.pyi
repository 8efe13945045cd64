"""The names that a sink of events may import; `events.py` imports each one when it is used."""

from reknit.events.records import DroppedRecord as DroppedRecord
from reknit.events.records import PhaseRecord as PhaseRecord
from reknit.events.records import StorageRecord as StorageRecord
from reknit.locations import Sink as Sink
