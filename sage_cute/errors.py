"""Every error that this package raises on purpose. Each message names the reason and the remedy."""


class UnsupportedError(ValueError):
    """Inputs are well formed, but no implementation covers them (device, size, layout)."""


class DTypeError(TypeError):
    """Tensors have a dtype, or a mix of dtypes, that attention does not take."""


class ArgumentError(TypeError):
    """A keyword that attention does not have."""


class ShapeError(ValueError):
    """Shapes of q, k and v do not fit together."""


class PolicyError(ValueError):
    """A policy string or its mix of precisions and granularities is not valid."""


class DoubleBackwardError(RuntimeError):
    """A gradient of a gradient was asked for; attention has first derivatives only."""


class SettingError(ValueError):
    """An environment variable of this package has a value that it does not take."""


class CacheError(RuntimeError):
    """A cache folder is not safe to use, or cannot be used."""


class KernelError(RuntimeError):
    """A compiled kernel cannot be made, found or loaded."""


class TuningError(RuntimeError):
    """Nothing can be tuned here, or what is tuned gives wrong results."""


class DiagnosisError(ValueError):
    """A model, its loss or its batch is not what a diagnosis needs."""
