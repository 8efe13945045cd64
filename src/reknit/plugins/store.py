"""What a store may import: the names in the stub beside this file."""

from reknit.plugins import exported

__getattr__ = exported(__name__)
