"""The command `strata`, as `python -m torch_strata` too. Says so if something that it imports is not installed."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command."""
    try:
        from torch_strata.cli import main as command
    except ImportError as error:
        # Python's own status for it is 1, by which the command says that something is damaged.
        sys.stderr.write(f"{type(error).__name__}: {error}; `pip install torch-strata` installs what strata needs\n")
        raise SystemExit(2) from None
    command()


if __name__ == "__main__":
    main()
