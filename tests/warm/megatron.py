"""Megatron-Core, adapted to the CPU."""

from tests.megatron import shim

shim.install()

import tests.megatron.gpt  # noqa: E402
import tests.megatron.jobs  # noqa: E402
import tests.megatron.truth  # noqa: E402
import tests.warm.plain  # noqa: E402, F401
