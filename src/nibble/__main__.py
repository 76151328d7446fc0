"""The process of `nibble`, and of `python -m nibble`."""

from nibble.bytecode import keep_bytecode


def main() -> None:
    """Run the command line."""
    with keep_bytecode():
        # Its modules are many, too.
        from nibble.cli.main import run

        run()


if __name__ == "__main__":
    main()
