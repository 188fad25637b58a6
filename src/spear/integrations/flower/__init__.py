"""Flower: what the replies of a real federation give away, seen from the server or from a client.

Two lines in a ServerApp:

    from spear.integrations.flower import Audited
    strategy = Audited(strategy, model=Net(), lr=0.01)

and one in a ClientApp: `ClientApp(mods=[what_leaves("audit", model=Net), ...])`.
"""

import os

from spear.errors import MissingExtra

# Flower, and the Ray of its simulations, report to their makers unless told not to. Flower reads this
# when it is imported; if that came first, or a variable is set, it stands.
os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

try:
    from flwr.serverapp.strategy import Strategy  # noqa: F401
except ImportError as error:
    raise MissingExtra("Flower", "flower") from error

from spear.integrations.flower.mod import what_leaves
from spear.integrations.flower.strategy import Audited

__all__ = ["Audited", "what_leaves"]
