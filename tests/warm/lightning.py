"""Lightning."""

import tests.warm.plain  # noqa: F401
