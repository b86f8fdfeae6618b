"""The command `slotkeeper`, also as `python -m proxy`."""

import sys


def main() -> int:
    """Run the command line; its exit code. Ctrl-C while modules are still imported ends it quietly, too."""
    try:
        from proxy.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
