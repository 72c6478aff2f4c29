"""Runs ``rolltree bench`` as ``python -m rolltree.bench``."""

import sys

from .cli import main

sys.exit(main(sys.argv[1:]))
