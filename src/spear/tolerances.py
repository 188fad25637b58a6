"""Every level that a verdict hangs on, each with where it comes from.

Budgets and block sizes stay where they are used. What is measured on each update (its noise, its
rounding, the data's range) is no constant: it comes from `Factors`.
"""

from __future__ import annotations

# What is claimed.

EXACT_ERROR = 1e-3
"""Of the data's range: 60 dB, the definition of "exact"."""

DEVIATIONS_TO_SPARE = 5.0
"""A predicted error is a standard deviation: a claim takes five of them (6e-7 of Gaussian errors are
larger), so that a sample is called exact up to 2e-4 of the range."""

CONTENT = 0.5
"""A predicted error of this share of the inputs' spread or more is nothing recovered: guessing their
mean would be off by one spread, and 1/2 in each direction leaves no two ordinary samples apart."""

LIKELY_MATCH = 0.85
"""Lambda from which unproved samples are called likely. Every wrong one takes off half its share, so a
batch in which a third is wrong ends below; right ones were seen at 0.94 and more after 50 local epochs
(the paper's table of epochs), and at 0.85 with dropout of 0.3 behind the layer."""

ROWS_PER_SAMPLE = 4.0
"""Live rows per sample from which the search finds a batch (64 of 200 rows, 250 of 1000): if as many
give nothing, the update is not what it was said to be; with fewer, the layer is too narrow."""

# Zeros and signs.

ZERO_DEVIATIONS = 5.0
"""A zero entry is one below 5 standard deviations of its noise (6e-7 of Gaussian entries exceed it)."""

UNDECIDED = 10.0
"""Between the zero level and ten times it an entry is undecided: it contradicts neither verdict."""

PATTERN_CHANCE = 1e-9
"""What chance may achieve (Cover's count of patterns) before a pattern proves something."""

DROWNED_CHANCE = 1e-6
"""More drowned entries than Poisson's law leaves to this chance are contradictions."""

SPARE_ROWS = 3
"""Rows that must say the same before it is believed: so that no two misread zeros decide."""

# Replay.

ROUNDINGS = 50.0
"""A replay agrees to a few roundings of the client's arithmetic, counted against the loss's gradient, a
difference of numbers of size one: 4 to 7 on real batches through six layers, and ten times that."""

REPLAY_LIMIT = 1e-3
"""However noisy an update is, a replay that is off by more of a gradient's length shows nothing."""

LATER_NOISE = 1.5
"""Times the layer's noise in later layers: its share of a norm hardly varies."""

LATER_NOISE_LIMIT = 1e-2
"""Of a later layer's gradient: with more noise than this a comparison would not say much."""

# Rivals.

COINCIDENCE = 1e-3
"""How likely a coincidence may be that a merge needs (equal weights although samples merged)."""

NEAR_DUPLICATE = 0.3
"""Of the usual distance between samples: nearer ones are near-duplicates. Where only these can merge,
equal weights exclude it, unless every sample of the batch has a near-duplicate: that is listed."""

LARGEST_MERGE = 64
"""Samples in one trace that a weight is compared with."""
