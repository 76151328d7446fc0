"""The command line: `nibble`. One file a command; main.py gathers them."""
