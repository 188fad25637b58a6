"""How good a recovery is, given the truth. Never imported by an attack.

Recovered samples are first assigned to true ones, at the least total cost; nothing is reordered in
place. What was not measured is None, never 0; an average says how many samples it is of.
"""

from spear.metrics.assignment import Assignment, assign
from spear.metrics.features import FeatureScore, score_features
from spear.metrics.images import ImageScore, score_images, ssim
from spear.metrics.lpips import FEATURES, HEADS, Lpips, NotMeasured
from spear.metrics.pixels import EXACT_DB, PERFECT_DB, Score, mae, mse, psnr, score
from spear.metrics.summaries import Average, Rate
from spear.metrics.tabular import TabularScore, score_table

__all__ = [
    "EXACT_DB",
    "FEATURES",
    "HEADS",
    "PERFECT_DB",
    "Assignment",
    "Average",
    "FeatureScore",
    "ImageScore",
    "Lpips",
    "NotMeasured",
    "Rate",
    "Score",
    "TabularScore",
    "assign",
    "mae",
    "mse",
    "psnr",
    "score",
    "score_features",
    "score_images",
    "score_table",
    "ssim",
]
