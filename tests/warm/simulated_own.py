"""The imports of `plain`, and the simulated device as a device type of its own; also for `pytest -p`."""

import tests.warm.plain  # noqa: F401
from tests.accelerator import install

install("sim")
