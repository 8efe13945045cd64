"""What the adapter for the objects of a framework may import: the names in the stub beside this file."""

from reknit.plugins import exported

__getattr__ = exported(__name__)
