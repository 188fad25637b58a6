"""Every level that decides a verdict, and where it comes from.

Budgets and block sizes stay where they are used. What is measured on each update (its noise, its
rounding, the data's range) is not a constant and comes from `Factors`.
"""

from __future__ import annotations

# What is claimed.

EXACT_ERROR = 1e-3
"""Of the data's range: 60 dB, the definition of "exact"."""

DEVIATIONS_TO_SPARE = 5.0
"""A predicted error is one standard deviation. A claim needs five (6e-7 of Gaussian errors are larger),
so a sample is called exact up to 2e-4 of the range."""

MAX_USEFUL_ERROR = 0.5
"""With a predicted error of this share of the inputs' spread or more, nothing was recovered: guessing
the mean is off by one spread, and 1/2 in each direction leaves no two ordinary samples apart."""

LIKELY_MATCH = 0.85
"""Lambda from which unproved samples are called likely. Each wrong one costs half its share, so a batch
with a third wrong falls below; correct ones had 0.94 and more after 50 local epochs (the paper's table
of epochs), and 0.85 with dropout of 0.3 behind the layer."""

ROWS_PER_SAMPLE = 4.0
"""Live rows per sample from which the search finds a batch (64 of 200 rows, 250 of 1000). If this many
give nothing, the update is not what it was said to be; with fewer, the layer is too narrow."""

MOVED_TOO_FAR = 0.5
"""How far local training moves preactivations, relative to their size, from which a search that finds
nothing is put down to it: batches of 20 in 200 neurons were found at 0.6 and below, half of them at
0.95, none at 1.2."""

SAME_NOISE = 1.25
"""Up to this factor, the noise of two layers is noise of one sigma: estimates from 40 rows and columns
are within 2 %, and k samples that drown in an m x n layer add at most k / (2 sqrt(m n)), 0.1 if m and n
are five times k."""

# Zeros and signs.

ZERO_DEVIATIONS = 5.0
"""An entry below 5 standard deviations of its noise is zero (6e-7 of Gaussian entries exceed that)."""

UNDECIDED = 10.0
"""Between the zero level and ten times it, an entry is undecided and contradicts nothing."""

MARGIN = 10.0
"""Up to this many times an expected error (a rounding, the edge of the noise, a predicted error), it is
that error. The largest of a thousand Gaussian entries is at 3.3 deviations; rounding is uneven, and
reached 4 times the edge."""

PATTERN_CHANCE = 1e-9
"""How likely a coincidence may be (by Cover's count of patterns) before a pattern proves something."""

BELOW_NOISE_CHANCE = 1e-6
"""More drowned entries than Poisson's law allows at this probability are contradictions."""

WRONG_SIGNS = 2e-3
"""Share of a round's signs that contradict its zeros from which its weights are not those of its
update, if other rounds have a tenth of that at most: right weights contradict none."""

SPARE_ROWS = 3
"""Rows that must agree before something is believed, so that two misread zeros cannot decide."""

# Replay.

ROUNDINGS = 50.0
"""A replay agrees to a few roundings of the client's arithmetic, relative to the loss's gradient, a
difference of numbers of size one: 4 to 7 on real batches through six layers. This is ten times that."""

REPLAY_LIMIT = 1e-3
"""However noisy the update, a replay off by more than this share of a gradient shows nothing."""

LATER_NOISE = 1.5
"""Noise allowed in later layers, relative to this layer's: its share of a norm hardly varies."""

LATER_NOISE_LIMIT = 1e-2
"""With more noise than this share of a later layer's gradient, a comparison says little."""

# Rivals.

COINCIDENCE = 1e-3
"""How likely the coincidence behind a merge may be (equal weights although samples merged)."""

NEAR_DUPLICATE = 0.3
"""Samples nearer than this share of the usual distance are near-duplicates. Where only these can merge,
equal weights exclude it, unless every sample has a near-duplicate: that is listed as an assumption."""

WHOLE_WEIGHT = 1e-2
"""How close to a whole number the weight of several samples in one trace is: their difference enters
squared, and is at most a tenth of their size where they cannot be told apart."""

LARGEST_MERGE = 64
"""The most samples in one trace that a weight is compared with."""

# What the spectrum and the bias gradient say before any search.

GAP = 100.0
"""A drop of the singular values by this much ends the samples, or those that can be found at a time:
from one value of noise to the next it is 1.01, and rounding is uneven by 40 at most."""

NOISY = 1e-4
"""Noise relative to the gradient's entries up to which kernels of b-1 rows stay sharp: they amplify it
by the condition of the submatrix, 1e2 to 1e3 on real batches."""

ROUNDING_VARIANCE = 0.045
"""Mean square error of a rounded number, in units of (eps times the number)^2: ulp^2 / 12, and ulp^2 is
3 / (8 ln 2) of that on average over a binade."""

MIN_ROUNDINGS_ABOVE = 3.0
"""Roundings of the loudest sample that a sample must exceed where the spectrum fades without a gap."""

WEAK_SAMPLE_FACTOR = 1e3
"""With a sample fainter than this times the noise edge, white coordinates are too noisy for kernels."""

SPARE_BIAS_ROWS = 10
"""Rows beyond one per sample that must agree before the bias gradient is read from some rows only."""

MIN_SPAN_OVERLAP = 0.1
"""The least share of a direction that those rows must hold: the scale's noise grows by its inverse."""

PENALTY_ROUNDINGS = 8.0
"""Noise, in roundings of the entries, up to which no penalty is looked for: at most 1 in float32, and
55 in float64, where the factorisation's own rounding counts as well."""

PENALTY_HINT = 0.2
"""Correlation between the weights and what lies outside the samples that hints at a penalty: 0.7 and
more with one, 1 / sqrt(m n) without."""

PENALTY_LEFT = 0.01
"""Share of that energy that may remain once a penalty is subtracted."""

FACTOR_OF_WEIGHTS_TOLERANCE = 1e-2
"""How close to one a factor of W must be to mean that the weights themselves were sent."""

# Parts of a batch.

PATTERN_AGREES_NOISY = 0.8
"""Share of rows whose sign must agree with the zeros where noise hides some of the zeros."""

PART_CHANCE = 1e-6
"""How likely a coincidence may be before the pattern of one sample says something."""

MISSING_TO_FOUND_RATIO = 1e-2
"""If the missing samples are this much fainter than those found, the latter are read as if alone."""

# Local training repeated: relative to the length of a column of summed gradients.

TRAINING_AGREES = 2e-3
"""How far a column may be off: 1e-4 and less if no hidden neuron changed sides, which is rare after 20
epochs. One neuron rounded to the other side makes it 1e-2 and more, and that is looked into."""

TRAINING_LATER = 3e-3
"""The same for later layers, which depend on an input's scale; its own column hardly does."""

TRAINING_FOLLOWS = 0.3
"""Share of the columns' error added for later layers: neurons on another side are in few samples."""

TRAINING_RECOGNISED = 0.2
"""Up to this a sample is recognised: a wrong label makes more than 1, and 0.1 to 0.4 in others."""

TRAINING_SIMULATED = 0.8
"""The same if mini-batches came in another order, which alone makes up to 0.6 for a sample with a small
gradient. A wrong label makes more than 1, and two samples in one trace weigh twice as much as one."""

TRAINING_SCALE = 0.03
"""How much faster than told weights or biases may have moved, if the order of mini-batches is not
known, with five standard deviations to spare: these are 0.2 to 0.5 % in the paper's six layers, and
about 1 % in two, where weights that moved faster and smaller inputs look nearly the same."""

TRAINING_DISTANCE = 4.0
"""Standard deviations from simulated clients up to which a client is one of them: in three dimensions
0.1 % of Gaussian vectors are farther. 0.3 to 2.3 were seen, and 7 to 96 if weights or biases moved at
0.98 times the rate in six layers."""

TRAINING_OTHER_SCALE = 1.25
"""How many times as far off the best tenth of all entries must be with inputs whose scale is off by
twice as much as is claimed, or more. TinyImageNet, six layers, 50 epochs: 1.5 to 1,000 times if inputs
are right (eight batches), 0.3 to 1.1 times if they are off by 0.5 or 1 % (ten)."""

TRAINING_OTHER_RATE = 0.5
"""If steps that are shorter or longer by one factor leave this share of the columns' error or less, the
learning rate was another one: 0.1 to 0.3 with a rate that halves from epoch to epoch."""

TRAINING_CLOSELY = 2e-4
"""A mix that holds this share of another sample is off by as much."""

# What was sent (spear.update.readings).

NEAR_THE_WEIGHTS = 0.9
"""Cosine of what was sent with the weights: weights after local training have 0.99 and more."""

FAR_FROM_WEIGHTS = 0.5
"""The same for anything else: gradients have about 0; a step as long as the weights leaves 0.7."""

LOWER_RANK = 0.1
"""Energy outside the leading half of the directions, right reading against wrong: the wrong one holds
the weights, so this compares rounding with half of them."""

EVEN_ENTRIES = 1.5
"""Median entry against largest, in units of Gaussian noise, from which an update looks like Adam's: 6
to 8 after one step, 2 to 5 after five to twenty, 1.3 and more for RMSprop. Gradients of 5 to 60 images
of MNIST and CIFAR-10 have 0.3 to 0.8."""
