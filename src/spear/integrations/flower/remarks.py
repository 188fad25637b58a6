"""What a reader of a Flower audit should know: what it saw, and who is protected from whom."""

from __future__ import annotations

from collections.abc import Iterator

from flwr.serverapp import strategy as flower
from flwr.serverapp.strategy import Strategy

from spear.report import Level, Remark
from spear.update import Protocol

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


def of_training(protocol: Protocol, *, aggregate: bool, seen: Remark = SEEN) -> Iterator[Remark]:
    """What clients send, and how they trained."""
    yield seen
    if protocol.sends == "weights":
        yield Remark(
            Level.NOTE,
            "Clients send weights",
            "The weights they received are subtracted, which leaves the learning rate times the "
            "gradients. That loses digits, the more the smaller the learning rate; but rounding is no "
            "protection to rely on.",
        )
    if not protocol.is_sgd and protocol.sends != "gradient":
        yield Remark(
            Level.NOTE,
            f"Clients train with {protocol.optimizer}",
            "It scales every entry on its own, and what is left has no low rank: this attack does not "
            "apply, and nothing was tried. That is no proof of safety.",
        )
    if (protocol.steps is not None and protocol.steps > 1) or protocol.mini_batches:
        yield Remark(
            Level.NOTE,
            "Several local steps",
            "The update is a sum over steps, between which weights and signs move. Samples come "
            "back less often, and are proved mostly where the whole training can be repeated: "
            "with full batches, and lr=, epochs=, momentum= and weight_decay= as the clients have "
            "them.",
        )
    if protocol.momentum:
        yield Remark(
            Level.NOTE,
            "Momentum",
            "The first step of SGD does not feel it. With several steps, the repetition includes it.",
        )
    if aggregate:
        yield Remark(
            Level.NOTE,
            "Secure aggregation",
            "Only the weighted mean of a round's replies was attacked, as one batch of all "
            "clients: what a server sees under secure aggregation. The replies themselves were "
            "not hidden in this run: Flower's message-based strategies receive each of them "
            "readable.",
        )


def kept(history: int, megabytes: float) -> Remark:
    """What the audit keeps of clients from round to round."""
    if history == 1:
        words = (
            "Nothing (history=1). What several rounds of a client give away together was not audited, "
            "and that can be more than any single reply."
        )
    else:
        words = (
            f"The last {history} rounds of each client, compressed, to audit them together: in the "
            f"memory of the server's process, {megabytes:g} MB at most, never in a file. They are "
            "deleted at the end of the run, and gone if the process is killed. Rounds that gave "
            "everything away by themselves are not kept. history=1 keeps nothing."
        )
    return Remark(Level.NOTE, "What is kept of clients between rounds", words)


def crowded_out(megabytes: float) -> Remark:
    """Rounds were dropped for lack of room."""
    return Remark(
        Level.NOTE,
        "Some rounds were not kept",
        f"They take more than {megabytes:g} MB. Clients with the fewest rounds went first; a server "
        "with more memory may learn more of them: raise history_megabytes=.",
    )


def not_combined(why: str) -> Remark:
    """Rounds do not fit together."""
    words = f"Of some replies: {why}. These were audited alone."
    return Remark(Level.NOTE, "Some rounds were not combined with others", words)


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


def mistaken(why: str) -> Remark:
    """Replies that are not what sends= says."""
    return Remark(Level.EXPOSED, "sends= looks wrong", f"Of some replies: {why}.")


MASKED = Remark(
    Level.PROTECTED,
    "SecAgg+",
    "Replies are masked: to the server, one of them alone is noise. aggregate=True audits what "
    "their sum gives away.",
)
