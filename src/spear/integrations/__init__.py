"""Other libraries' training runs, seen by SPEAR. Each module needs the extra of its own name.

`pytest_plugin` is loaded by pytest itself.
"""
