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

MAX_USEFUL_ERROR = 0.5
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

MARGIN = 10.0
"""Times an expected error (a rounding, the noise's edge, a predicted error): up to this, it is that
error. The largest of a thousand Gaussian entries is at 3.3 deviations, and rounding is uneven: 4 times
the edge was seen."""

PATTERN_CHANCE = 1e-9
"""What chance may achieve (Cover's count of patterns) before a pattern proves something."""

BELOW_NOISE_CHANCE = 1e-6
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

WHOLE_WEIGHT = 1e-2
"""How near to a whole number the weight of several samples in one trace is: their difference enters
squared, and it is a tenth of their size at most where they are not told apart."""

LARGEST_MERGE = 64
"""Samples in one trace that a weight is compared with."""

# What the spectrum and the bias gradient say before any search.

NOISY = 1e-4
"""Noise, relative to the gradient's entries, up to which kernels of b-1 rows stay sharp: they amplify
it by the condition of the submatrix, 1e2 to 1e3 on real batches."""

MIN_ROUNDINGS_ABOVE = 3.0
"""Roundings of the loudest sample that a sample must stand above, where the spectrum fades without a
gap."""

WEAK_SAMPLE_FACTOR = 1e3
"""Times the noise's edge: with a fainter sample whitened coordinates are too noisy for kernels."""

SPARE_BIAS_ROWS = 10
"""Rows beyond one a sample that must agree before the bias gradient is read from some rows only."""

MIN_SPAN_OVERLAP = 0.1
"""The least share of a direction that those rows must hold: a scale's noise grows by its inverse."""

PENALTY_ROUNDINGS = 8.0
"""Noise, in roundings of the entries, up to which no penalty is looked for: 1 at most was seen in
float32, and 55 in float64, where the factorisation's own rounding counts as well."""

PENALTY_HINT = 0.2
"""Correlation with the weights, of what lies outside the samples, that hints at a penalty: 0.7 and
more where there was one, 1 / sqrt(m n) where there was none."""

PENALTY_LEFT = 0.01
"""Share of that energy which may remain once a penalty is taken off."""

FACTOR_OF_WEIGHTS_TOLERANCE = 1e-2
"""How near to one a factor of W means that the weights themselves were sent."""

# Parts of a batch.

PATTERN_AGREES_NOISY = 0.8
"""Share of rows whose sign must agree with the zeros where noise hides some of them."""

PART_CHANCE = 1e-6
"""What chance may achieve before the pattern of one sample says something."""

MISSING_TO_FOUND_RATIO = 1e-2
"""Where the missing samples are this much fainter than those found, these are read as if alone."""

# Local training, repeated: relative to the length of a column of summed gradients.

TRAINING_AGREES = 2e-3
"""How far it may be off: 1e-4 and less where no hidden neuron changed sides, which after 20 epochs is
rare. One that rounds to the other side makes 1e-2 and more of it; that is looked into."""

TRAINING_LATER = 3e-3
"""The same for later layers, which see an input's scale; its own column hardly does."""

TRAINING_FOLLOWS = 0.3
"""Of what columns are off, on top, for later layers: neurons on another side are in few samples."""

TRAINING_RECOGNISED = 0.2
"""A sample is recognised up to this: a wrong label makes more than 1, and 0.1 to 0.4 in others."""

TRAINING_CLOSELY = 2e-4
"""A mix with a share of this is off by as much."""

# What was sent (spear.update.readings).

NEAR_THE_WEIGHTS = 0.9
"""Cosine with the weights that were sent: those after local training have 0.99 and more."""

FAR_FROM_WEIGHTS = 0.5
"""The same of what are no weights: gradients have about 0; a step as long as the weights leaves 0.7."""

LOWER_RANK = 0.1
"""What the right reading has outside half of its directions, against the wrong one, which holds the
weights: rounding against half of them."""

EVEN_ENTRIES = 1.5
"""Times what Gaussian noise has, the median entry against the largest from which on an update is one
of Adam: 6 to 8 at one step, 2 to 5 at five to twenty, 1.3 and more for RMSprop. Gradients of 5 to 60
images of MNIST and CIFAR-10 have 0.3 to 0.8."""
