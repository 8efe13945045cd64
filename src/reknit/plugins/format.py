"""What the format of another program may import: the names in the stub beside this file."""

from reknit.plugins import exported

__getattr__ = exported(__name__)
