"""``torch.ops.sage``: the ops, and everything by which they compose with torch.compile."""

if not __name__.startswith("sage_cute."):
    raise ImportError(
        "import sage_cute.compile_integration: this folder is installed inside the package"
    )
