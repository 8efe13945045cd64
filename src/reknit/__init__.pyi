"""The public names, and the modules that define them: for type checkers, and for `__init__.py`."""

__version__: str
__all__: list[str]

from reknit import errors as errors
from reknit import policies as policies
from reknit import sinks as sinks
from reknit import transforms as transforms
from reknit.api.loads import load as load
from reknit.api.phases import phase as phase
from reknit.api.ranks import alone as alone
from reknit.api.ranks import connect as connect
from reknit.api.saves import close as close
from reknit.api.saves import prepare as prepare
from reknit.api.saves import save as save
from reknit.api.stored import cool as cool
from reknit.api.stored import delete as delete
from reknit.api.stored import latest as latest
from reknit.api.stored import note as note
from reknit.api.stored import open as open
from reknit.api.stored import pin as pin
from reknit.api.stored import promote as promote
from reknit.api.stored import steps as steps
from reknit.api.stored import unpin as unpin
from reknit.api.stored import verify as verify
from reknit.engine.loading.browse import Checkpoint as Checkpoint
from reknit.engine.outcome import PendingSave as PendingSave
from reknit.engine.reports import LoadReport as LoadReport
from reknit.engine.reports import PromotionReport as PromotionReport
from reknit.engine.reports import SaveReport as SaveReport
from reknit.engine.reports import VerifyReport as VerifyReport
from reknit.errors import CheckpointExistsError as CheckpointExistsError
from reknit.errors import CheckpointNotFoundError as CheckpointNotFoundError
from reknit.errors import CommError as CommError
from reknit.errors import CorruptError as CorruptError
from reknit.errors import DeadlineError as DeadlineError
from reknit.errors import MismatchError as MismatchError
from reknit.errors import ReknitError as ReknitError
from reknit.errors import StorageError as StorageError
from reknit.errors import UsageError as UsageError
from reknit.frameworks.custom import register_framework as register_framework
from reknit.frameworks.per_rank import PerRank as PerRank
from reknit.frameworks.per_rank import RngState as RngState
from reknit.options import CommOptions as CommOptions
from reknit.options import LoadOptions as LoadOptions
from reknit.options import SaveOptions as SaveOptions
from reknit.options import Tls as Tls
from reknit.runs.checkpointer import Checkpointer as Checkpointer
from reknit.runs.cooling import Cool as Cool
from reknit.runs.tiers import Tier as Tier
from reknit.runs.watch import watch as watch
from reknit.types.manifest import SavedStep as SavedStep
