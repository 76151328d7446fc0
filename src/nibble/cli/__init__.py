"""The command line: `nibble`. One file a command; main.py gathers them.

Owns words on a terminal, JSON for scripts, and exit codes. Must not decide anything about caches or models.
"""
