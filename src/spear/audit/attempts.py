"""An update, attacked: with what is known of the model, and without what was only guessed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from spear.inversion import Inversion, Outcome, invert
from spear.judge import Proof
from spear.update import LayerUpdate

_CONFIRMED = "The replay confirms that it is one."
_UNCONFIRMED = (
    "Nothing confirms that: with another activation than ReLU, dropout or normalisation this says "
    "little. Give the model."
)
_OTHER_LOSS = (
    "The update is not that of a cross-entropy loss on class labels. It was proved for a loss whose "
    "gradient at the outputs can be anything; name the client's loss if labels are wanted."
)
_OTHER_MODEL = (
    "No model was given. The weights look like a plain MLP with ReLUs, but such a model does not "
    "reproduce the update: what follows the layer, or the loss, is another. The layer alone was "
    "judged; give the model (and the loss) for a proof by replay and for labels."
)
_MATCHED = 0.99  # lambda from which the samples are right, and only the proof may have failed


@dataclass(frozen=True, eq=False)
class Observed:
    """What the files show: the layer, the model if there is one, and what had to be assumed."""

    view: LayerUpdate
    model: nn.Module | None
    guessed: bool  # was the model recognised from its weights, not given?
    notes: tuple[str, ...]


def attacked(
    seen: Observed, loss: Any, options: Mapping[str, Any]
) -> tuple[Inversion, LayerUpdate, tuple[str, ...]]:
    """Invert; where the patterns match but the proof fails for what was only assumed, without that."""
    result = invert(seen.view, model=seen.model, loss=loss, **options)
    if (result.match or 0) < _MATCHED or _confirmed(result):
        return result, seen.view, (*seen.notes, *_guess(seen, result))
    if loss is None and seen.model is not None:
        other = invert(seen.view, model=seen.model, loss=nn.MSELoss(), **options)
        if other.outcome is Outcome.EXACT and other.proof is Proof.REPLAY:
            return other, seen.view, (*seen.notes, *_guess(seen, other), _OTHER_LOSS)
    if seen.guessed:
        alone = _alone(seen.view)
        other = invert(alone, **options)
        if other.outcome is Outcome.EXACT:
            return other, alone, (_OTHER_MODEL,)
    return result, seen.view, (*seen.notes, *_guess(seen, result))


def _guess(seen: Observed, result: Inversion) -> tuple[str, ...]:
    """What became of a guess of the model."""
    if not seen.guessed:
        return ()
    return (_CONFIRMED if result.proof is Proof.REPLAY else _UNCONFIRMED,)


def _confirmed(result: Inversion) -> bool:
    """Did the model and the loss explain any sample? Then they are the client's, and judge the rest."""
    labelled = result.labels is not None and bool((result.labels >= 0).any())
    return labelled or (result.proof is Proof.REPLAY and bool(result.certified.any()))


def _alone(view: LayerUpdate) -> LayerUpdate:
    """The same layer, without what was assumed of the rest."""
    return LayerUpdate(
        weight=view.weight,
        bias=view.bias,
        weight_grad=view.weight_grad,
        bias_grad=view.bias_grad,
        relu="after" if view.relu == "both" else view.relu,
        training=view.training,
    )
