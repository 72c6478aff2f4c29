"""``python -m rolltree.bench``, the same as ``rolltree bench``."""

import sys

from .cli import main

sys.exit(main(sys.argv[1:]))
