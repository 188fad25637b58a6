"""What a reader of an audit should know: what it saw, how clients trained, and what is kept of them."""

from __future__ import annotations

from collections.abc import Iterator

from spear.integrations.several_rounds import SeveralRounds
from spear.report import Level, Remark
from spear.update import Protocol


def of_training(protocol: Protocol, seen: Remark) -> Iterator[Remark]:
    """What was seen, what clients send, and how they trained."""
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
            f"memory of the process, {megabytes:g} MB at most, never in a file. They are "
            "deleted at the end of the run, and gone if the process is killed. Rounds that gave "
            "everything away by themselves are not kept. history=1 keeps nothing."
        )
    return Remark(Level.NOTE, "What is kept of clients between rounds", words)


def of_history(several: SeveralRounds | None) -> Iterator[Remark]:
    """Rounds that were not kept, or not combined with others."""
    if several is not None and several.history.crowded_out:
        yield crowded_out(several.history.megabytes)
    if several is not None and several.refused:
        yield not_combined(several.refused)


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


def mistaken(why: str) -> Remark:
    """Replies that are not what sends= says."""
    return Remark(Level.EXPOSED, "sends= looks wrong", f"Of some replies: {why}.")


MASKED = Remark(
    Level.PROTECTED,
    "SecAgg+",
    "Replies are masked: to the server, one of them alone is noise. aggregate=True audits what "
    "their sum gives away.",
)
