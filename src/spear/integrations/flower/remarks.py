"""What is Flower's own in an audit: its log, what was seen of it, and who is protected from whom."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from spear.integrations.examiner import Framework
from spear.report import Level, Remark

FLOWER = Framework(
    "flower",
    "flwr",
    logging.getLogger("flwr.spear"),  # below Flower's own logger: its format, its handlers
    "Flower apps keep local epochs in the run config, which messages do not carry: "
    'Audited(..., epochs=context.run_config["local-epochs"])',
)

_SERVER_SIDE = (
    flower.DifferentialPrivacyServerSideFixedClipping,
    flower.DifferentialPrivacyServerSideAdaptiveClipping,
)
_CLIENT_SIDE = (
    flower.DifferentialPrivacyClientSideFixedClipping,
    flower.DifferentialPrivacyClientSideAdaptiveClipping,
)


def wrapped(strategy: object) -> Iterator[Strategy]:
    """A strategy and all that it wraps, from the outside in."""
    while isinstance(strategy, Strategy):
        yield strategy
        strategy = vars(strategy).get("strategy")


def of_strategy(strategy: Strategy) -> Iterator[Remark]:
    """What the strategy itself does for privacy."""
    for one in wrapped(strategy):
        name = type(one).__name__
        if isinstance(one, _SERVER_SIDE):
            yield Remark(
                Level.EXPOSED,
                name,
                "It clips and adds its noise on the server, after every client's reply has "
                "arrived there as it is. That protects clients from those who see the trained "
                "model, but not from the server, nor from anyone who reads along there.",
            )
        elif isinstance(one, _CLIENT_SIDE):
            yield Remark(
                Level.EXPOSED,
                name,
                "Clients only clip: their update is scaled as a whole, which hides nothing in it. The "
                "noise is added on the server, after the replies have arrived, and protects nobody "
                "from the server.",
            )


SEEN = Remark(
    Level.NOTE,
    "What was seen",
    "Replies as they arrived, after everything that mods on the clients did to them (clipping, "
    "the noise of LocalDpMod), and before anything that the server's strategy does. The verdict "
    "is about this attack; a reply from which nothing was recovered is not proved safe.",
)


AGGREGATED = Remark(
    Level.NOTE,
    "Secure aggregation",
    "Only the weighted mean of a round's replies was attacked, as one batch of all "
    "clients: what a server sees under secure aggregation. The replies themselves were "
    "not hidden in this run: Flower's message-based strategies receive each of them "
    "readable.",
)


def inside(outer: Strategy) -> Remark:
    """Audited is wrapped by another strategy, where it should be outermost."""
    name = type(outer).__name__
    return Remark(
        Level.EXPOSED,
        f"Audited is inside {name}",
        f"{name} changes replies before it hands them on, so this audit is not about what the clients "
        f"sent, and the server may see more than it shows. Put Audited outermost: Audited({name}(...), "
        "...). A reply from which nothing was recovered is not proved safe.",
    )
