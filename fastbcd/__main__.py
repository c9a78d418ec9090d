"""`python -m fastbcd`: the same as the command `fastbcd`."""

import sys

from fastbcd.cli.main import main

sys.exit(main())
