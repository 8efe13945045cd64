"""Lightning."""

import lightning.pytorch.strategies  # noqa: F401

import reknit.integrations.lightning  # noqa: F401
import tests.warm.plain  # noqa: F401
