"""`python -m fastbcd`: the same as the command `fastbcd`."""

import sys

from fastbcd.cli import main

sys.exit(main())
