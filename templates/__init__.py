"""Kernel templates in CuTe DSL: Python classes that compile to GPU code."""

if not __name__.startswith("sage_cute."):
    raise ImportError("import sage_cute.templates: this folder is installed inside the package")
