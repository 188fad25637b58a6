"""An approximate reconstruction as a prior for the paper's sampling ("combining SPEAR with an
approximate reconstruction").

For each approximate sample, the paper takes the 3b neurons with the most negative preactivation and
draws submatrices within these. `SamplingFinder(prior=...)` does that, from approximate inputs. Not
in the paper: true inputs lie in the span of the gradient's rows, at the scale that the bias
gradient gives, so approximate ones are first moved to the nearest point there. That removes all of
an error but its b - 1 coordinates inside the span, and never adds to it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spear.errors import InvalidOption
from spear.factors import factorise
from spear.update import LayerUpdate


def prior_from(view: LayerUpdate, inputs: Tensor, *, project: bool = True) -> Tensor:
    """Approximate inputs (k, n) as `SamplingFinder(prior=...)` takes them.

    Args:
        view: the update they were approximated from.
        inputs: (k, n) the layer's inputs as an attack guessed them; rows that are not finite go.
        project: move each to the nearest combination of the gradient's rows; False as in the paper.

    >>> from torch import nn
    >>> from spear import observe
    >>> net = nn.Sequential(nn.Linear(300, 40), nn.ReLU(), nn.Linear(40, 5))
    >>> x, y = torch.randn(4, 300), torch.tensor([0, 4, 2, 1])
    >>> loss = nn.functional.cross_entropy(net(x), y)
    >>> view = observe(net, torch.autograd.grad(loss, list(net.parameters())))
    >>> rough = x + torch.randn(4, 300)
    >>> bool((prior_from(view, rough) - x).norm() < 0.3 * (rough - x).norm())
    True
    """
    _check(view, inputs)
    guesses = inputs.detach()[inputs.isfinite().all(1)]
    if not project:
        return guesses
    factors = factorise(view)
    if not factors.batch_size:
        return guesses
    R = factors.combine(torch.diag(1 / factors.singular_values))  # (b, n), orthonormal rows
    C = guesses.to(R) @ R.T  # (k, b)
    h = factors.bias_coordinates  # every true sample has c . h = 1
    C = C + (1 - C @ h)[:, None] * h / h.square().sum()
    return (C @ R).to(guesses)


def _check(view: LayerUpdate, inputs: Tensor) -> None:
    if inputs.ndim != 2 or inputs.shape[1] != view.inputs:
        raise InvalidOption(
            f"expected approximate inputs (k, {view.inputs}), got {tuple(inputs.shape)}"
        )
