"""`python -m nibble`: the command line where no `nibble` script is installed."""

from nibble.cli.main import run

run()
