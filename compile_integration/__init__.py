"""``torch.ops.sage``: the ops, and everything by which they compose with the rest of torch.

Importing this package registers all of it.
"""

if not __name__.startswith("sage_cute."):
    raise ImportError(
        "import sage_cute.compile_integration: this folder is installed inside the package, and a "
        "second copy would register the ops twice"
    )

from sage_cute.compile_integration import (
    autocast,
    autograd,
    batching,
    cuda,
    flops,
    ops,
    varlen,
)
from sage_cute.compile_integration.cache_key import extend_cache_key

extend_cache_key()

__all__ = ["autocast", "autograd", "batching", "cuda", "flops", "ops", "varlen"]
