"""The command `spear`."""

import sys


def main() -> None:
    """Run the command line, or say what to install for it."""
    try:
        import jinja2  # noqa: F401
        import rich  # noqa: F401
        import typer  # noqa: F401
    except ImportError as error:
        sys.exit(f"spear: the command line needs {error.name}: pip install 'spear-fl[cli]'")
    from spear.cli import run

    run()


if __name__ == "__main__":
    main()
