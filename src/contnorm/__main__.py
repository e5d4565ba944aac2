"""``python -m contnorm`` and the script ``contnorm``: the command line."""

import gc
import sys

from contnorm import __version__
from contnorm.cli.process_end import note_status, skip_teardown

skip_teardown()  # before anything else registers an exit function

_collects = gc.isenabled()
gc.disable()  # imports create many objects and no garbage
try:
    from contnorm.cli.main import main as run_command
except KeyboardInterrupt:  # Ctrl-C while modules are still imported
    raise SystemExit(130) from None
except ModuleNotFoundError as error:
    if error.name not in ("typer", "rich"):
        raise
    if sys.argv[1:] == ["--version"]:
        print(f"contnorm {__version__}")
        raise SystemExit(0) from None
    print(f"contnorm: the command line needs {error.name}. Install it: pip install 'contnorm[bench]'", file=sys.stderr)
    raise SystemExit(2) from None
finally:
    if _collects:
        gc.enable()

__all__ = ["main"]


def main() -> None:
    """Run the command line and end the process."""
    try:
        run_command()
    except SystemExit as end:
        note_status(end.code)
        raise


if __name__ == "__main__":
    main()
