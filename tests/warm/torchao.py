"""torchao, whose optimizers and quantized tensors take a second to import."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torchao.optim
    import torchao.quantization  # noqa: F401

import tests.warm.plain  # noqa: F401
