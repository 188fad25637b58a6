"""What the server sees: a layer's update, how it came about, and how to read it from what was sent.

`observe` picks a layer of a model and reads what a client sent. `LayerUpdate` is that layer, `Protocol`
what is known of how the update came about. `inspect_layers` says which layers can be attacked.
"""

from spear.update.forms import matched_names
from spear.update.layer_update import LayerUpdate
from spear.update.layers import (
    LayerReport,
    Relu,
    SoftRelu,
    Squash,
    inspect_layers,
    network_after,
    network_before,
    soften,
    trace,
    without_squash,
)
from spear.update.observing import no_such_layer, observe
from spear.update.plain_mlp import describe_plain_mlp, linear_layers, natural_order, plain_mlp
from spear.update.precision import double
from spear.update.protocol import (
    ENTRYWISE,
    LOCAL_TRAINING,
    NOISE_UNITS,
    UNKNOWN_PROTOCOL,
    Clipping,
    Protocol,
    Sends,
)
from spear.update.readings import looks_like_adam
from spear.update.rounds import Round, Rounds
from spear.update.shapes import channels_last, embedding_of, input_shapes, picture
from spear.update.watching import Watched, layer_inputs, reading

__all__ = [
    "ENTRYWISE",
    "LOCAL_TRAINING",
    "NOISE_UNITS",
    "UNKNOWN_PROTOCOL",
    "Clipping",
    "LayerReport",
    "LayerUpdate",
    "Protocol",
    "Relu",
    "Round",
    "Rounds",
    "Sends",
    "SoftRelu",
    "Squash",
    "Watched",
    "channels_last",
    "describe_plain_mlp",
    "double",
    "embedding_of",
    "input_shapes",
    "inspect_layers",
    "layer_inputs",
    "linear_layers",
    "looks_like_adam",
    "matched_names",
    "natural_order",
    "network_after",
    "network_before",
    "no_such_layer",
    "observe",
    "picture",
    "plain_mlp",
    "reading",
    "soften",
    "trace",
    "without_squash",
]
