"""How good a recovery is, given the truth. Never imported by an attack.

Recovered samples are first assigned to true ones, the best way there is; nothing is reordered in
place. What was not measured is None and says why, never 0; an average says how many samples it is of.
"""

from spear.metrics.assignment import Assignment, assign
from spear.metrics.features import FeatureScore, cosine, score_features
from spear.metrics.images import ImageScore, score_images, ssim
from spear.metrics.lpips import FEATURES, HEADS, Lpips, NotMeasured
from spear.metrics.pixels import EXACT_DB, PERFECT_DB, Score, mae, mse, psnr, score
from spear.metrics.summaries import Average, Rate, exact_rate
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
    "cosine",
    "exact_rate",
    "mae",
    "mse",
    "psnr",
    "score",
    "score_features",
    "score_images",
    "score_table",
    "ssim",
]
