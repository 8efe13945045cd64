"""torchtitan, on the CPU."""

import tests.warm.plain  # noqa: F401
from tests.integrations import torchtitan_job

torchtitan_job.on_cpu()
import torchtitan.models.llama3.config_registry  # noqa: E402
import torchtitan.trainer  # noqa: E402, F401

import reknit.integrations.torchtitan  # noqa: E402, F401
