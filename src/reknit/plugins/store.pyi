"""The names that a store may import; `store.py` imports each one when it is used."""

from reknit.storage.base import CommitsLate as CommitsLate
from reknit.storage.base import Dated as Dated
from reknit.storage.base import ExistingError as ExistingError
from reknit.storage.base import Listed as Listed
from reknit.storage.base import Reading as Reading
from reknit.storage.base import Storage as Storage
from reknit.storage.base import Writer as Writer
from reknit.storage.base import existing as existing
from reknit.storage.base import missing as missing
from reknit.storage.base import too_large as too_large
from reknit.storage.local.memory import MemoryStorage as MemoryStorage
from reknit.storage.local.store import LocalStorage as LocalStorage
from reknit.storage.paths import check_path as check_path
from reknit.storage.ranges import read_runs as read_runs
from reknit.storage.registry import open_storage as open_storage
from reknit.storage.registry import register as register
from reknit.storage.wrappers.forwarding import ForwardingStorage as ForwardingStorage
from reknit.storage.wrappers.forwarding import ForwardingWriter as ForwardingWriter
from reknit.storage.wrappers.retrying import RetryingStorage as RetryingStorage
from reknit.storage.wrappers.retrying import RetryPolicy as RetryPolicy
from reknit.storage.wrappers.retrying import with_retries as with_retries
