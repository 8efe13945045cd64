"""torchft, with the transport of reknit."""

import reknit.integrations.torchft  # noqa: F401
import tests.warm.plain  # noqa: F401
