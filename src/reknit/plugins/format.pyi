"""The names that the format of another program may import; `format.py` imports each one when it is used."""

from reknit.integrations.formats.entries import ForeignEntries as ForeignEntries
from reknit.storage.base import HasFolderAbove as HasFolderAbove
from reknit.storage.base import Storage as Storage
from reknit.types.box import Box as Box
from reknit.types.manifest import Extent as Extent
from reknit.types.shard import TensorSpec as TensorSpec
from reknit.types.small import Foreign as Foreign
from reknit.types.small import Unread as Unread
