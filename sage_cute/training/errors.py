"""The one error of this package."""


class SetupError(ValueError):
    """A run cannot start as asked (data, sizes, device); the message says what to change."""
