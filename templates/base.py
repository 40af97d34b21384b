"""The contract of a kernel template, checked when the class is defined."""

from typing import ClassVar


class AttnTemplate:
    """A kernel as a function of (problem, config): both frozen, both known before compilation.

    ``__init__`` takes them and nothing else. ``__call__`` (``cute.jit``) makes layouts, copies and
    the grid out of tensors; ``kernel`` (``cute.kernel``) allocates, builds pipelines and dispatches
    roles; the mathematics is in ``blocks``. The class docstring has the layouts, the roles, the
    pipelines and the map of shared memory.
    """

    family: ClassVar[str]
    direction: ClassVar[str]
    roles: ClassVar[tuple[str, ...]]

    def __init_subclass__(cls) -> None:
        """Refuses a template whose contract has holes."""
        for name in ("family", "direction", "roles", "supports", "kernel", "__call__"):
            if not hasattr(cls, name):
                raise TypeError(f"template {cls.__name__} lacks {name}")
        for topic in ("Layouts", "Roles", "Pipelines", "Shared memory"):
            if topic not in (cls.__doc__ or ""):
                raise TypeError(f"template {cls.__name__}: its docstring says nothing of {topic}")
