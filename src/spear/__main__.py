"""The command `spear`."""

import sys


def main() -> None:
    """Run the command line, or say what to install for it. Ctrl-C ends it with code 130."""
    try:
        try:
            from spear.cli import run
        except ImportError as error:
            if error.name not in ("typer", "rich", "jinja2", "PIL", "skimage"):
                raise
            sys.exit(
                f"spear: the command line needs {error.name}: pip install 'spear-fl[cli]', "
                "or in a clone pip install -e '.[cli]'"
            )
        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
