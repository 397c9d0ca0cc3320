"""``python -m tracefile.cli``."""

from tracefile.cli import main

main()
