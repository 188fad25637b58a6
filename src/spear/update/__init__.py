"""What the server sees: a layer's update, how it came to be, and how it is read from what was sent."""

from spear.update.layer_update import LayerUpdate
from spear.update.observing import observe
from spear.update.protocol import Protocol
from spear.update.readings import scales_entries

__all__ = ["LayerUpdate", "Protocol", "observe", "scales_entries"]
