"""DeepSpeed, on the CPU."""

import tests.warm.plain  # noqa: F401
from tests.deepspeed import engines

engines.deepspeed()
