"""DeepSpeed, on the CPU."""

from tests.deepspeed import engines

engines.deepspeed()
