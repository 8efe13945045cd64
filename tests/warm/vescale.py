"""veScale, adapted to the CPU."""

import tests.warm.plain  # noqa: F401
from tests.vescale import jobs

jobs.shim()
