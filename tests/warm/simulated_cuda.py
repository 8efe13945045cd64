"""The imports of `plain`, and the simulated device in the place of CUDA; also for `pytest -p`."""

import tests.warm.plain  # noqa: F401
from tests.accelerator import install

install("cuda")
