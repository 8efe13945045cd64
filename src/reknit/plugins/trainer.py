"""What a replacement for the checkpoints of a trainer may import: the names in the stub beside this file."""

from reknit.plugins import exported

__getattr__ = exported(__name__)
