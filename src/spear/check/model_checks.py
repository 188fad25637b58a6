"""What a model's own make-up says about an attack: one small check for each thing, in plain words."""

from __future__ import annotations

from torch import nn

from spear.check.exposure import Check, Exposure
from spear.check.model_structure import LayerView, ModelStructure, batch_norms, dropouts, has_modes
from spear.check.rehearsal import Rehearsal
from spear.report import Level, Remark

# Where a neuron is off, its output gradient is zero; rounding makes no exceptions, other graphs do.
_SPARSE = 0.99
_MIN_ACTIVE_SHARE = 0.9  # of the neurons that are on still have a gradient: fewer means dropout


def untraceable(structure: ModelStructure) -> Check:
    """The forward could not be followed."""
    if not structure.untraced:
        return Check()
    words = (
        f"{structure.untraced}. Layers were read in the order in which they are registered, which "
        "may not be the order in which they are used: look at the table of layers, and name the "
        "one to judge."
    )
    return Check((Remark(Level.NOTE, "not traceable", words),))


def nothing_to_attack(structure: ModelStructure, batch_size: int | None) -> Check:
    """No layer is next to a ReLU: is that a protection, or merely another attack's business?"""
    layers = structure.layers
    if not layers:
        words = (
            "The model has no linear layer, and SPEAR attacks no other kind. Gradients of "
            "convolutions have their own attacks (optimisation; see spear.baselines), which are "
            "not exact."
        )
        remark = Remark(Level.PROTECTED, "no linear layer", words)
        return Check((remark,), Exposure.NOT_EXPOSED, "the model has no linear layer")
    divides = next((layer for layer in layers if layer.divides), None)
    if batch_size == 1 and divides is not None:
        return _lone_sample(divides)
    near = next((layer for layer in layers if layer.near), None)
    if near is not None:
        words = (
            f"SPEAR refuses layer {near.name!r} ({near.report.why}), but {near.near}: its gradient "
            "is as sparse as behind a plain ReLU. Whoever rewrites the layer can attack it; do "
            "not rely on it."
        )
        remark = Remark(Level.EXPOSED, "a ReLU in disguise", words)
        return Check((remark,), Exposure.PARTLY, "a layer is sparse though SPEAR refuses it")
    unseen = [layer.name for layer in layers if layer.unseen]
    if unseen:
        words = (
            f"Layers {_listed(unseen)} could not be judged: {structure.layers[0].report.why}. Audit "
            "the model with made-up data (spear invert --layer) before you rely on it."
        )
        remark = Remark(Level.NOTE, "not judged", words)
        return Check((remark,), Exposure.UNKNOWN, "its layers could not be judged")
    words = (
        "No linear layer has a bias and a ReLU beside it, so nothing in its gradient is zero and "
        "SPEAR has nothing to search for. The gradient still spans the batch's inputs: attacks "
        "that only approximate (optimisation, independence) are not ruled out, so do not count "
        "this as privacy."
    )
    remark = Remark(Level.PROTECTED, "no ReLU to attack", words)
    return Check(
        (remark,), Exposure.NOT_EXPOSED, "no linear layer with a bias stands next to a ReLU"
    )


def _lone_sample(layer: LayerView) -> Check:
    words = (
        "In a batch of one every linear layer with a bias gives its input away, whatever "
        f"activation follows: the weight gradient of {layer.name!r} divided by its bias gradient "
        "is the input. Never send an update of a single sample."
    )
    remark = Remark(Level.EXPOSED, "a batch of one", words)
    if layer.report.reads_data:
        return Check((remark,))
    return Check((remark,), Exposure.PARTLY, "what comes back are activations, not the data")


def what_it_reads(layer: LayerView) -> Check:
    """Do the data come back, or what earlier layers made of them?"""
    size = f"Layer {layer.name!r} ({layer.inputs} → {layer.outputs})"
    if layer.report.reads_data:
        words = f"{size} reads the data itself, and {layer.report.why}."
        return Check((Remark(Level.EXPOSED, "reads the data", words),))
    words = (
        f"{size} can be attacked ({layer.report.why}), but reads {layer.reads}: these "
        "come back exactly, and the data as far as what stands before can be inverted "
        "(docs/settings.md)."
    )
    remark = Remark(Level.EXPOSED, "reads activations", words)
    return Check((remark,), Exposure.PARTLY, f"what comes back are {layer.reads}, not the data")


def skipped_layers(structure: ModelStructure, chosen: LayerView) -> Check:
    """Layers closer to the data that are not attacked, and why."""
    remarks = []
    for layer in structure.layers:
        if layer.name == chosen.name:
            break
        if layer.near:
            words = (
                f"{layer.name!r} is closer to the data. SPEAR refuses it ({layer.report.why}), but "
                f"{layer.near}: do not rely on it."
            )
            remarks.append(Remark(Level.EXPOSED, "a ReLU in disguise", words))
        else:
            why = "the batch is too large for it" if layer.attackable else layer.report.why
            words = f"{layer.name!r} is closer to the data, but {why}."
            remarks.append(Remark(Level.PROTECTED, "a layer in front", words))
    return Check(tuple(remarks))


def embeddings(model: nn.Module) -> Check:
    """Words that a client used show in the embedding's gradient, without any attack."""
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.weight.requires_grad
    ]
    if not names:
        return Check()
    words = (
        f"The gradient of the embedding {_listed(names)} is zero in every row but those of the "
        "words that occur in the batch: which words a client used shows without any attack. "
        "Freeze the embedding, or do not send its gradient."
    )
    return Check((Remark(Level.EXPOSED, "embedding", words),))


def modes(model: nn.Module) -> Check:
    """Was the model judged in the mode that clients train in?"""
    if model.training or not has_modes(model):
        return Check()
    words = (
        "The model is in eval mode, in which dropout and batch norm do nothing random or "
        "batch-wide. Clients usually train in train mode: call model.train() to judge that."
    )
    return Check((Remark(Level.NOTE, "eval mode", words),))


def before_the_layer(layer: LayerView) -> Check:
    """Random or batch-wide steps between the data and the layer."""
    if layer.report.caveat:
        remark = Remark(
            Level.PROTECTED, "train mode, before the layer", f"{layer.report.caveat.words}."
        )
        return Check(
            (remark,), Exposure.PARTLY, "dropout or batch norm change the data before the layer"
        )
    if "layer norm" in layer.fronts:
        words = (
            "A layer or group norm stands before the layer: what comes back is normalised, so a "
            "sample's own mean and scale are lost, its shape is not."
        )
        return Check((Remark(Level.NOTE, "layer norm", words),))
    return Check()


def behind_the_layer(model: nn.Module, layer: LayerView, seen: Rehearsal | None) -> Check:
    """Dropout and batch norm in train mode behind the layer protect nobody; they cost the proof."""
    before = None if layer.report.caveat is None else layer.report.caveat.module
    dropped = [name for name in dropouts(model) if name != before]
    normed = [name for name in batch_norms(model) if name != before]
    remarks = []
    thinned = seen is not None and layer.report.relu != "before" and seen.on < _MIN_ACTIVE_SHARE
    if dropped and thinned:
        words = (
            f"Dropout right behind the layer's ReLU ({_listed(dropped)}, in train mode) adds zeros "
            "to the gradient. The samples come back all the same, but their signs contradict the "
            "zeros, so SPEAR proves nothing: do not take that for protection."
        )
        remarks.append(Remark(Level.EXPOSED, "dropout behind the layer", words))
    elif dropped:
        words = (
            f"Dropout ({_listed(dropped)}, in train mode) makes the gradient random, which a "
            "replay cannot repeat: samples come back, proved by their patterns only."
        )
        remarks.append(Remark(Level.NOTE, "dropout", words))
    if normed:
        words = (
            f"Batch norm ({_listed(normed)}, in train mode) ties the samples of a batch together: "
            "a replay of single samples cannot repeat that, so there is no proof by replay."
        )
        remarks.append(Remark(Level.NOTE, "batch norm", words))
    return Check(tuple(remarks))


def rehearsed_gradient(
    model: nn.Module, layer: LayerView, seen: Rehearsal, samples: int
) -> list[Check]:
    """What the rehearsal showed of the layer's gradient itself."""
    checks = []
    if seen.rows != samples:
        words = (
            f"The layer sees {seen.rows} rows for {samples} samples (tokens or positions): each of "
            "them counts as a sample of its own, against the width and for the time."
        )
        checks.append(Check((Remark(Level.NOTE, "rows", words),)))
    if layer.report.relu != "before" and seen.off < _SPARSE:
        words = (
            f"On made-up inputs only {100 * seen.off:.0f} % of the gradients of neurons that are "
            "off were zero, so no ReLU follows the layer in truth: its forward is not what it "
            "seems."
        )
        remark = Remark(Level.PROTECTED, "not sparse", words)
        checks.append(Check((remark,), Exposure.UNKNOWN, "the layer's gradient is not sparse"))
    if seen.rank < seen.rows:
        checks.append(_rank(model, seen))
    return checks


def _rank(model: nn.Module, seen: Rehearsal) -> Check:
    showing = f"On made-up inputs {seen.rows} samples left a gradient of rank {seen.rank} only"
    normed = batch_norms(model)
    if normed:
        words = (
            f"{showing}: batch norm in train mode ({_listed(normed)}) takes the batch's mean off "
            "right beside the layer, so its samples cannot be told apart. This ends in eval mode, "
            "and where another layer is attacked."
        )
        remark = Remark(Level.PROTECTED, "batch norm beside the layer", words)
        return Check((remark,), Exposure.NOT_EXPOSED, "batch norm hides a sample of every batch")
    words = (
        f"{showing}: a narrow layer before it, or gradients that vanish, hide the others; only "
        "what shows can come back."
    )
    remark = Remark(Level.PROTECTED, "samples that do not show", words)
    return Check((remark,), Exposure.PARTLY, "not every sample shows in the gradient")


def _listed(names: list[str]) -> str:
    some = ", ".join(repr(name) for name in names[:3])
    return some if len(names) <= 3 else f"{some} and {len(names) - 3} more"
