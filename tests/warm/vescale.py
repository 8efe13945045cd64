"""veScale, adapted to the CPU."""

from tests.vescale import jobs

jobs.shim()
