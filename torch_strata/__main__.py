"""The command `strata`, as `python -m torch_strata` too. Says so if something that it imports is not installed."""

import signal
import sys
from typing import NoReturn

__all__ = ["main"]

# As a shell says it: 128 and the signal.
_INTERRUPTED, _TERMINATED = 130, 143


def main() -> None:
    """Run the command."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)
    try:
        from torch_strata.cli import main as command
    except KeyboardInterrupt:
        raise SystemExit(_INTERRUPTED) from None
    except ImportError as error:
        # Python's own status for it is 1, by which the command says that something is damaged.
        sys.stderr.write(f"{type(error).__name__}: {error}; `pip install torch-strata` installs what strata needs\n")
        raise SystemExit(2) from None
    command()


def _terminate(*_: object) -> NoReturn:
    """End as by Ctrl-C: what a command has begun is removed."""
    raise SystemExit(_TERMINATED)


if __name__ == "__main__":
    main()
