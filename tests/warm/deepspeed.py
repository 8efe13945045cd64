"""DeepSpeed, on the CPU."""

from importlib import import_module
from importlib.util import find_spec

import tests.warm.plain  # noqa: F401
from tests.deepspeed import engines

engines.deepspeed()
# An engine of ZeRO-3 imports this, and the compiler of torch with it, which takes most of a second.
if find_spec("deepspeed.runtime.zero.muon"):
    import_module("deepspeed.runtime.zero.muon.muon_optimizer")
