"""``python -m sage_cute``: the same as the command ``sage-cute``."""

from sage_cute.cli import main

if __name__ == "__main__":
    main()
