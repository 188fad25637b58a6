"""Flower: what the replies of a real federation give away, seen from the server or from a client.

Two lines in somebody's ServerApp:

    from spear.integrations.flower import Audited
    strategy = Audited(strategy, model=Net(), lr=0.01)

and one in a ClientApp: `ClientApp(mods=[what_leaves("audit", model=Net), ...])`.
"""

from spear.errors import MissingExtra

try:
    from flwr.serverapp.strategy import Strategy  # noqa: F401
except ImportError as error:
    raise MissingExtra("Flower", "flower") from error

from spear.integrations.flower.mod import what_leaves
from spear.integrations.flower.strategy import Audited

__all__ = ["Audited", "what_leaves"]
