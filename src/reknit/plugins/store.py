"""The names that a store may import; they are in the stub beside this file."""

from reknit.plugins import exported

__getattr__ = exported(__name__)
