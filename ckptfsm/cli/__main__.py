"""``python -m ckptfsm.cli``."""

import sys

from ckptfsm.cli import main

if __name__ == "__main__":
    sys.exit(main())
