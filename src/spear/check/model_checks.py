"""What model and protocol alone say about an attack, whatever the data: one function per check."""

from __future__ import annotations

import math

from torch import nn

from spear import theory
from spear.check.model_structure import LayerView, ModelStructure, with_modes
from spear.check.reasons import Reason, Subject
from spear.federated import Noise, Privacy
from spear.report import Level
from spear.update import Protocol

_ROUNDS = 10  # that the theory is asked about, where no number is given


def untraceable(structure: ModelStructure) -> Reason | None:
    """The forward pass could not be traced."""
    if structure.watched:
        words = "The model was watched on a made-up input, and may do something else on others."
        why = f"It was not traced: {structure.watched}."
        return Reason(Level.NOTE, Subject.UNTRACED, words, why)
    if not structure.untraced:
        return None
    words = "The linear layers were tried in the order of registration, as if ReLUs followed them."
    why = f"The model was not traced: {structure.untraced}."
    return Reason(Level.NOTE, Subject.UNTRACED, words, why)


def embeddings(model: nn.Module) -> Reason | None:
    """An embedding's gradient shows which words a client used, without any attack."""
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.weight.requires_grad
    ]
    if not names:
        return None
    words = f"The gradient of the embedding {_listed(names)} shows which words a client used."
    more = (
        "It is zero except in the rows of the words that occur in the batch: no attack is needed. "
        "Freeze the embedding, or do not send its gradient."
    )
    return Reason(Level.EXPOSED, Subject.EMBEDDING, words, more)


def modes(model: nn.Module) -> Reason | None:
    """Is the model in the mode that clients train in, and what does that mode do?"""
    if at_work := with_modes(model, at_work=True):
        words = (
            f"Dropout or batch norm is at work ({_listed(at_work)}, in train mode), which a replay "
            "cannot repeat."
        )
        more = "That usually prevents the proof, not the recovery. Do not take it for protection."
        return Reason(Level.NOTE, Subject.TRAIN_MODE, words, more)
    if with_modes(model, at_work=False):
        words = "The model is in eval mode; clients usually train in train mode."
        more = (
            "In eval mode dropout is off and batch norm does not depend on the batch. Call "
            "model.train() (--mode train) to judge train mode."
        )
        return Reason(Level.NOTE, Subject.EVAL_MODE, words, more)
    return None


def optimiser(protocol: Protocol) -> Reason | None:
    """Adam and similar optimisers scale every entry separately."""
    if protocol.is_sgd:
        return None
    if protocol.sends == "gradient":
        words = f"Clients send gradients, in which no step of {protocol.optimizer} shows."
        return Reason(Level.NOTE, Subject.OPTIMISER, words)
    words = (
        f"Steps of {protocol.optimizer} scale every entry of the update separately, so it has no low "
        "rank and SPEAR has nothing to factorise."
    )
    more = (
        "That proves nothing: signs and small entries still depend on the data. If the server takes "
        "these steps and clients send gradients, check without --optimizer."
    )
    return Reason(Level.PROTECTED, Subject.OPTIMISER, words, more)


def what_it_reads(layer: LayerView) -> Reason | None:
    """Does the data itself come back, or what earlier layers made of it?"""
    if layer.report.reads_data or layer.unseen:
        return None
    words = f"Layer {layer.name!r} ({layer.inputs} → {layer.outputs}) reads {layer.reads}."
    more = "The data comes back as far as the layers before can be inverted (spear docs settings)."
    return Reason(Level.EXPOSED, Subject.ACTIVATIONS, words, more)


def open_layer(layer: LayerView) -> Reason | None:
    """What lets the attack in, where it got in: a layer that reads the data, and its ReLU."""
    if not layer.report.reads_data or not layer.attackable:
        return None
    stands = {"after": "behind", "before": "before"}.get(str(layer.report.relu), "on both sides of")
    words = f"Layer {layer.name!r} reads the data itself, with a ReLU {stands} it."
    return Reason(Level.EXPOSED, Subject.LAYER, words)


def defences(protocol: Protocol) -> Reason:
    """What clients do to their updates did not stop the attack."""
    if protocol.defended:
        words = "What clients do to updates before they are sent did not stop it."
    else:
        words = "Updates are sent as they are: no clipping, no noise, no sum over clients."
    return Reason(Level.EXPOSED, Subject.DEFENCES, words)


def before_the_layer(layer: LayerView) -> Reason | None:
    """Steps between the data and the layer that are random or mix the samples of a batch."""
    if layer.report.caveat is None:
        return None
    words = f"{layer.report.caveat.words}."
    return Reason(Level.PROTECTED, Subject.BEFORE, words)


def skipped_layers(structure: ModelStructure, chosen: LayerView) -> list[Reason]:
    """Layers closer to the data that are not attacked, and why."""
    remarks = []
    for layer in structure.layers:
        if layer.name == chosen.name:
            break
        if layer.near:
            remarks.append(in_disguise(layer))
        else:
            why = "the batch is too large for it" if layer.attackable else layer.report.why
            words = f"{layer.name!r} is closer to the data, but {why}."
            remarks.append(Reason(Level.PROTECTED, Subject.IN_FRONT, words))
    return remarks


def in_disguise(layer: LayerView) -> Reason:
    """A layer that SPEAR refuses as it stands, but that could be attacked once rewritten."""
    words = (
        f"The gradient of layer {layer.name!r} is as sparse as behind a plain ReLU: an attacker can "
        "rewrite the layer and attack it."
    )
    more = f"SPEAR refuses it ({layer.report.why}), but {layer.near}. Do not rely on this."
    return Reason(Level.EXPOSED, Subject.DISGUISE, words, more)


def no_layer(structure: ModelStructure) -> Reason:
    """The model has nothing for SPEAR to attack, whatever the data."""
    if not structure.layers:
        words = "The model has no linear layer, and SPEAR attacks no other kind."
        more = (
            "Gradients of convolutions have their own attacks (optimisation; see spear.baselines), "
            "which are not exact."
        )
        return Reason(Level.PROTECTED, Subject.NO_LAYER, words, more)
    words = (
        "No linear layer has a bias and a ReLU beside it, so nothing in its gradient is zero and "
        "SPEAR has nothing to search for."
    )
    more = (
        "The gradient still spans the batch's inputs: attacks that only approximate (optimisation, "
        "independence) are not ruled out, so do not count this as privacy."
    )
    return Reason(Level.PROTECTED, Subject.NO_RELU, words, more)


def too_many_samples(layer: LayerView, rows: int, rounds: int = 1) -> Reason | None:
    """A gradient of full rank hides its samples, unless some of them vanish or coincide."""
    outputs = layer.outputs * (rounds if layer.report.reads_data else 1)
    if rows < min(outputs, layer.inputs):
        return None
    side = "outputs" if outputs <= layer.inputs else "inputs"
    seen = "a layer" if rounds == 1 else f"{rounds} rounds of a layer"
    words = (
        f"{rows} samples for {seen} with {getattr(layer, side)} {side}: the gradient has full rank, "
        "and no sample can be told from the others."
    )
    more = "Duplicates and samples whose gradient vanishes, as in trained networks, do not count."
    return Reason(Level.PROTECTED, Subject.FULL_RANK, words, more)


def over_rounds(layer: LayerView, rows: int, rounds: int) -> Reason | None:
    """What several rounds of the same data add, by the theory of how many determine a batch."""
    if layer.unseen:
        return None
    if not layer.report.reads_data:
        words = (
            "Rounds were not combined: the layers before this one are trained meanwhile, so what it "
            "reads changes from round to round."
        )
        return Reason(Level.NOTE, Subject.ROUNDS, words) if rounds > 1 else None
    several = rounds if rounds > 1 else _ROUNDS
    width, limit = layer.outputs, layer.inputs
    one, more = (theory.largest_batch(width, count, inputs=limit) for count in (1, several))
    words = (
        f"In theory, one update of this layer determines up to {one:,} samples, and {several} rounds "
        f"of the same data up to {more:,}."
    )
    needed = theory.rounds_needed(rows, width, inputs=limit)
    further = []
    if needed is None:
        further.append(f"No number of rounds determines {rows:,}.")
    elif needed > 1:
        further.append(f"These {rows:,} take about {needed} rounds.")
    if rounds == 1 and more > one:
        further.append(f"A rehearsal over rounds shows what comes back (--rounds {several}).")
    return Reason(Level.NOTE, Subject.ROUNDS, words, " ".join(further))


def drowned(structure: ModelStructure, protocol: Protocol, updates: int) -> Reason | None:
    """Clipping and noise that hide any data: the only noise that can be judged without a rehearsal.

    Clipped to norm C, the mean over samples and clients has at most norm C, and so have the singular
    values of any layer's gradient, whatever the data. Noise of sigma hides a singular value up to
    sigma (m n)^(1/4) altogether: no singular value of the noisy matrix stands out, and its singular
    vectors say nothing about the hidden ones (Baik, Ben Arous, Péché; Benaych-Georges, Nadakuditi).
    Averaging over clients, and over the updates that the server sees from one client, lowers the noise.
    """
    sigma = noise_that_hides(structure, protocol, updates)
    if sigma is None or not protocol.clip or not protocol.sigma or protocol.sigma < sigma:
        return None
    hidden = protocol.clip * protocol.sigma / sigma
    words = (
        f"Whatever the data, clipping bounds the norm of what is sent by {protocol.clip:g}, and this "
        f"noise hides everything up to {hidden:.2g} in every layer: no sample stands out."
    )
    return Reason(Level.PROTECTED, Subject.NOISE, words)


def noise_that_hides(structure: ModelStructure, protocol: Protocol, updates: int) -> float | None:
    """The sigma from which noise hides any data, clipped as told; None without clipping and noise."""
    bounded = protocol.sends == "gradient" or protocol.clips == "global"
    if not (protocol.clip and protocol.sigma and bounded and protocol.reduction == "mean"):
        return None
    smallest = min(x.inputs * x.outputs for x in structure.layers if x.attackable or x.unseen)
    sigma: float = protocol.clip * math.sqrt(protocol.clients * updates) / smallest**0.25
    return sigma


def epsilon(noise: Noise, privacy: Privacy) -> Reason | None:
    """The noise as epsilon, if Opacus is installed and the protocol says enough."""
    if not noise.sigma:
        return None
    if noise.multiplier is None:
        words = (
            "No epsilon is stated: it is defined only if the gradients of a known number of samples "
            "are clipped one by one, or the whole update is clipped."
        )
    elif noise.epsilon is None:
        words = "Stating epsilon takes Opacus: pip install 'spear-fl[opacus]'."
    else:
        words = (
            f"A noise multiplier of {noise.multiplier:.4g} is epsilon = {noise.epsilon:,.4g} by "
            f"Opacus' RDP accountant, {privacy.words()}."
        )
    return Reason(Level.NOTE, Subject.EPSILON, words)


def _listed(names: list[str]) -> str:
    some = ", ".join(repr(name) for name in names[:3])
    return some if len(names) <= 3 else f"{some} and {len(names) - 3} more"
