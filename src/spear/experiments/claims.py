"""Summary: the paper's claims, each confirmed, qualified or refuted by the rows of its experiments.

A claim has a rule, which says what rows would confirm it and what rows would refute it. Nothing here is
typed in but the paper's own figures and the rules.
"""

from __future__ import annotations

import enum
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spear import theory
from spear.experiments import (
    batch_size,
    failure_validation,
    fedavg_epochs,
    fedavg_rates,
    layers,
)
from spear.experiments.common import Experiment, Section, catalogue, table
from spear.experiments.common.experiment import Rows
from spear.experiments.common.figures import (
    NOT_RUN,
    counts,
    decimal,
    metric,
    quantile,
    share_of,
    time_of,
    values_of,
    where,
)
from spear.metrics import Rate

AllRows = Mapping[str, Rows]
FEW = 5  # batches; fewer confirm nothing, as hardly any share is outside their interval
AT_ONCE = 10**4  # submatrices that the paper looks at side by side (Figure 4)


class Verdict(enum.StrEnum):
    """What the rows make of a claim."""

    CONFIRMED = "confirmed"
    QUALIFIED = "qualified"
    REFUTED = "refuted"
    OPEN = "not measured"

    @staticmethod
    def by(confirmed: bool, refuted: bool) -> Verdict:
        """Refuted wins; neither is qualified."""
        if refuted:
            return Verdict.REFUTED
        return Verdict.CONFIRMED if confirmed else Verdict.QUALIFIED


@dataclass(frozen=True)
class Claim:
    """What the paper says, and how rows decide about it.

    Args:
        words: the claim.
        paper: its figure in the paper, or where it says so.
        rule: what confirms it, and what refutes it; anything else qualifies it.
        sources: experiments whose rows decide; one without rows leaves it open.
        judge: from the rows to what they say, and the verdict.
    """

    words: str
    paper: str
    rule: str
    sources: tuple[str, ...]
    judge: Callable[[AllRows], tuple[str, Verdict]]

    def line(self, rows: AllRows) -> list[str]:
        """Of the table."""
        ours, verdict = NOT_RUN, Verdict.OPEN
        if all(rows[source] for source in self.sources):
            ours, verdict = self.judge(rows)
        places = [(catalogue.load(source).place, source) for source in self.sources]
        named = [
            f"`{name}`" if place.startswith("Beyond") else f"{place}, `{name}`"
            for place, name in places
        ]
        return [self.words, self.paper, ours, f"**{verdict}**", "; ".join(named)]


def told(rate: Rate) -> str:
    """A share with its 95 % Clopper-Pearson interval."""
    low, high = (100 * end for end in rate.interval())
    return f"{rate.count} of {rate.trials} ({low:.1f}–{high:.1f} %)"


def reaches(rate: Rate, share: float) -> bool:
    """Does the 95 % interval hold this share, or lie above it?"""
    return rate.trials > 0 and rate.interval()[1] >= share


def span(values: Sequence[float], digits: int = 1) -> str:
    """From the least to the greatest."""
    low, high = (decimal(end, digits) for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def per_cent(text: str) -> float:
    """A share as the tables of the paper have it.

    >>> per_cent("> 95 %")
    0.95
    """
    return float(text.strip("> %")) / 100


def accuracy(rows: AllRows) -> tuple[str, Verdict]:
    groups = {
        finder: [where(rows["main"], data=data, finder=finder) for data in datasets(rows, finder)]
        for finder in ("cascade", "sampling")
    }
    words = {"cascade": "our finder", "sampling": "the paper's finder"}
    parts = [
        f"{words[finder]}: {told(share_of([row for group in own for row in group]))}"
        for finder, own in groups.items()
    ]
    reached = [reaches(share_of(group), 0.99) for own in groups.values() for group in own]
    enough = all(sum(map(len, own)) >= FEW for own in groups.values())
    return "; ".join(parts), Verdict.by(all(reached) and enough, not any(reached))


def datasets(rows: AllRows, finder: str) -> list[str]:
    return values_of(where(rows["main"], finder=finder), "data")


def spectrum(rows: AllRows) -> tuple[str, Verdict]:
    own = [row for row in rows["main"] if row.metrics]
    size = Rate(sum(r.metrics.get("batch_size") == r.settings["b"] for r in own), len(own))
    right = [row for row in own if row.metrics.get("exact")]
    match = Rate(sum(row.metrics.get("match") == 1.0 for row in right), len(right))
    both = (size, match)
    ours = f"b read off rightly: {told(size)}; λ = 1 in exact batches: {told(match)}"
    return ours, Verdict.by(
        all(rate.count == rate.trials for rate in both),
        any((rate.share or 0.0) < 0.5 for rate in both),
    )


def shape_of_network(rows: AllRows) -> tuple[str, Verdict]:
    own = rows["architecture"]
    shapes = sorted({(row.settings["m"], row.settings["depth"]) for row in own})
    found = {
        (m, depth): share_of(where(own, m=m, depth=depth, b=20, finder="cascade"))
        for m, depth in shapes
    }
    wide = [rate.interval() for (m, _), rate in found.items() if m >= 200]
    apart = max(low for low, _ in wide) > min(high for _, high in wide)
    whole = Rate(sum(r.count for r in found.values()), sum(r.trials for r in found.values()))
    small = where(own, b=12, depth=6, finder="overlapping")
    widths = values_of(small, "m")
    middle = [quantile(counts(where(small, m=m)), 0.5) for m in widths]
    fewer = bool(middle) and middle[-1] < middle[0]
    ours = f"exact in {len(found)} networks together: {told(whole)}"
    if middle:
        ours += (
            f"; submatrices at b = 12: {middle[0]:,.0f} at m = {widths[0]}, {middle[-1]:,.0f} at "
            f"m = {widths[-1]}"
        )
    enough = all(rate.trials >= FEW for rate in found.values())
    return ours, Verdict.by(fewer and enough and not apart, apart)


def submatrices(rows: AllRows) -> tuple[str, Verdict]:
    over = {}
    for b in batch_size.SIZES:
        own = counts(where(rows["batch_size"], m=2000, b=b, finder="independent"))
        if own:
            over[b] = statistics.fmean(own) / theory.expected_samples(b)
    seen = {b: ratio for b, ratio in over.items() if theory.expected_samples(b) >= AT_ONCE}
    near = [0.5 <= ratio <= 2 for ratio in seen.values()]
    ours = ", ".join(f"{over[b]:.2f} (b = {b})" for b in over if b % 6 == 2)
    ours = f"mean count over the lemma's, m = 2000: {ours}"
    if any(over[b] < 0.5 for b in over if b not in seen):
        ours += (
            f"; below b = {min(seen, default=0)}, where the figure is flat, too many are asked for"
        )
    return ours, Verdict.by(bool(near) and all(near), bool(near) and not near[-1])


def narrow(rows: AllRows) -> tuple[str, Verdict]:
    ratios, foreseen = {}, {}
    for b in batch_size.SIZES:
        both = [
            counts(where(rows["batch_size"], m=m, b=b, finder="overlapping")) for m in (200, 2000)
        ]
        if all(both):
            few, many = (quantile(own, 0.5) for own in both)
            ratios[b] = few / many
            few, many = (
                theory.expected_samples_narrow(b, m, overlapping=True) for m in (200, 2000)
            )
            foreseen[b] = few / many
    ours = ", ".join(
        f"{ratios[b]:.1f} (b = {b}, theory {foreseen[b]:.1f})" for b in ratios if b > 15
    )
    return f"median at m = 200 over that at 2000: {ours}", Verdict.by(
        all(10 <= ratios[b] <= 40 and 10 <= foreseen[b] <= 40 for b in ratios if b > 15),
        max(ratios.values(), default=0.0) < 10,
    )


def failure(rows: AllRows) -> tuple[str, Verdict]:
    own = [row for row in rows["failure_validation"] if row.metrics]
    above, points = {"lemma": 0, "cifar10": 0}, {"lemma": 0, "cifar10": 0}
    cells = sorted({(r.settings["source"], r.settings["b"], r.settings["m"]) for r in own})
    for source, b, m in cells:
        found = where(own, source=source, b=b, m=m)
        failures, matrices = (sum(metric(found, name)) for name in ("failures", "matrices"))
        # All points hold together with 95 %.
        low, _ = Rate(int(failures), int(matrices)).interval(1 - 0.05 / len(cells))
        points[source] += 1
        above[source] += low > theory.failure_bound(b, m)
    proved = failure_validation.paper_fails()
    ours = (
        f"proved to fail more often than it allows at {len(proved)} of {failure_validation.points()} "
        f"sizes (up to {max(proved.values(), default=0):.0f} times). Counts lie above it at "
        f"{above['lemma']} of {points['lemma']} sizes with the lemma's own distribution, and at "
        f"{above['cifar10']} of {points['cifar10']} with real batches. Failures are rare all the "
        f"same: at most {decimal(theory.failure_bound_by_columns(20, 200))} at b = 20, m = 200"
    )
    counted = any(above.values())
    return ours, Verdict.by(not proved and not counted, bool(proved) or above["lemma"] > 0)


def second_stage(rows: AllRows) -> tuple[str, Verdict]:
    parts, gained, lost, more, fewer = [], 0, 0, 0, 0
    by_size: dict[bool, list[int]] = {False: [], True: []}  # large b or not
    for pool, words in (("paper", "the paper's filter"), ("ours", "our pool")):
        own = [row for row in where(rows["two_stages"], pool=pool) if row.metrics]
        won = [r.metrics["exact_both"] - r.metrics["exact_first"] for r in own]
        found = [r.metrics["recovered_both"] - r.metrics["recovered_first"] for r in own]
        gained, lost = gained + won.count(1), lost + won.count(-1)
        for data in values_of(own, "data"):
            sizes = values_of(where(own, data=data), "b")
            for row, change in zip(own, won, strict=True):
                if row.settings["data"] == data:
                    by_size[row.settings["b"] > statistics.median(sizes)].append(change)
        more += sum(change > 0 for change in found)
        fewer += sum(change < 0 for change in found)
        parts.append(f"{words}: {told(Rate(won.count(1), len(own)))} exact only with it")
    ours = f"{'; '.join(parts)}; more samples right in {more} runs, fewer in {fewer}"
    small, large = (statistics.fmean(own) if own else 0.0 for own in by_size.values())
    return ours, Verdict.by(gained > lost and large >= small, gained <= lost and more <= fewer)


def clipping(rows: AllRows) -> tuple[str, Verdict]:
    clean = where(rows["dpsgd"], attack="spear", sigma=0.0)
    clips = [clip for clip in values_of(clean, "clip") if clip is not None]
    groups = [where(clean, clip=clip) for clip in clips]
    rates = [share_of(group) for group in groups]
    means = [statistics.fmean(metric(group, "psnr")) for group in groups if metric(group, "psnr")]
    whole = Rate(sum(rate.count for rate in rates), sum(rate.trials for rate in rates))
    intervals = [rate.interval() for rate in rates]
    apart = max(low for low, _ in intervals) > min(high for _, high in intervals)
    broken = apart or not reaches(whole, 0.5)
    ours = f"exact at C = {span(clips, 2)}: {told(whole)}"
    if not means:
        return ours, Verdict.by(False, broken)
    alike = whole.count == whole.trials and max(means) - min(means) <= 1
    return f"{ours}; mean PSNR {span(means)} dB", Verdict.by(alike, broken)


def noise(rows: AllRows) -> tuple[str, Verdict]:
    loud = where(rows["dpsgd"], attack="spear", sigma=1e-4)
    groups = [where(loud, clip=clip) for clip in values_of(loud, "clip")]
    ours, best = (
        [statistics.fmean(values) for group in groups if (values := metric(group, name))]
        for name in ("psnr", "reference")
    )
    if not ours:
        return NOT_RUN, Verdict.OPEN
    words = f"mean PSNR {span(ours)} dB at C = 1 to 2"
    helped = [statistics.fmean(v) for group in groups if (v := metric(group, "psnr_prior"))]
    if helped:
        words += f", {span(helped)} dB with the prior that images are smooth"
    if best:
        words += f"; {span(best)} dB for one who knows the layer's output gradients"
    return words, Verdict.by(min(ours) > 28, max(ours) < 20)


def defence(rows: AllRows) -> tuple[str, Verdict]:
    own = [row for row in rows["rounds_noise"] if row.metrics]
    hidden: dict[int, tuple[float, Rows] | None] = {}
    rounds = values_of(own, "rounds")
    for seen in (rounds[0], rounds[-1]):
        group = where(own, rounds=seen)
        levels = values_of(group, "multiplier")
        clear = [max(metric(where(group, multiplier=z), "clear"), default=0.0) for z in levels]
        quiet = [z for i, z in enumerate(levels) if not any(clear[i:])]
        hidden[seen] = (quiet[0], group) if quiet else None
    parts = []
    for seen, at in hidden.items():
        if at is None:
            parts.append(f"after {seen} rounds: at no noise that was tried")
            continue
        spent = metric(where(at[1], multiplier=at[0]), "epsilon")
        words = f"after {seen} round{'s' * (seen > 1)} from z = {at[0]:g} on"
        parts.append(f"{words} (ε = {max(spent):,.0f})")
    first = hidden[rounds[0]]
    return f"nothing recognisable {'; '.join(parts)}", Verdict.by(first is None, False)


def fedavg(rows: AllRows) -> tuple[str, Verdict]:
    trained = [*rows["fedavg_epochs"], *rows["fedavg_rates"]]
    paper = {**fedavg_epochs.PAPER, **fedavg_rates.PAPER}
    pairs = [
        ([row for row in trained if row.settings == fedavg_epochs.cell(*how)], per_cent(published))
        for how, (_, published) in paper.items()
    ]
    found = [(share_of(own), share) for own, share in pairs if own]
    reached = [reaches(rate, share) for rate, share in found]
    run = [row for own, _ in pairs for row in own]
    ours = (
        f"exact in {len(found)} settings together: {told(share_of(run))}; proved: "
        f"{told(share_of(run, 'proved'))}"
    )
    return ours, Verdict.by(all(reached), not any(reached))


def exponential(rows: AllRows) -> tuple[str, Verdict]:
    sizes = [b for b in batch_size.SIZES if b >= 10]
    means = {
        b: statistics.fmean(own)
        for b in sizes
        if (own := counts(where(rows["batch_size"], m=2000, b=b, finder="independent")))
    }
    finite = {b: mean for b, mean in means.items() if math.isfinite(mean)}
    doublings = math.nan
    if len(finite) > 1:
        doublings = statistics.linear_regression(
            list(finite), [math.log2(mean) for mean in finite.values()]
        ).slope
    cascade = where(rows["frontier"], finder="cascade")
    found = {
        (r.settings["b"], r.settings["m"]): where(cascade, b=r.settings["b"], m=r.settings["m"])
        for r in cascade
    }
    rates = {size: share_of(group) for size, group in found.items()}
    good = [size for size, r in rates.items() if r.trials >= FEW and (r.share or 0.0) >= 0.95]
    b, m = max(good, default=(0, 0))
    ours = f"sampling: 2^({doublings:.2f} b) submatrices (m = 2000, b = 10 to 20)"
    if b:
        middle = statistics.median(map(time_of, found[b, m]))
        whole = told(share_of(found[b, m]))
        ours += f"; our finder: {b} of {m}, {whole} exact, {middle:.0f} s on a CPU"
    return ours, Verdict.by(0.8 <= doublings <= 1.2 and b <= 25, not doublings >= 0.8)


def aggregation(rows: AllRows) -> tuple[str, Verdict]:
    own = rows["rounds_aggregation"]
    groups = sorted({(r.settings["clients"], r.settings["present"]) for r in own})
    once, ever, ends = [], [], []
    for clients, present in groups:
        group = where(own, clients=clients, present=present)
        rounds = values_of(group, "rounds")
        once += [row for row in where(group, rounds=rounds[0]) if row.metrics.get("recovered")]
        whole = [r for r in rounds if all(metric(where(group, rounds=r), "exact") or [0])]
        ever.append(bool(whole))
        ends += whole[:1]
    each = sorted({r.settings["b"] // r.settings["clients"] for r in own})
    many = f"{groups[0][0]} to {groups[-1][0]} clients of {' or '.join(map(str, each))} samples"
    ours = (
        f"{many}, m = {' or '.join(map(str, values_of(own, 'm')))}: after one round samples came back "
        f"in {len(once)} runs, and with more rounds all samples in {sum(ever)} of {len(ever)} groups"
    )
    if ends:
        ours += f", from {min(ends)} to {max(ends)} rounds on"
    return ours, Verdict.by(not once and not any(ever), bool(once))


def any_layer(rows: AllRows) -> tuple[str, Verdict]:
    found = {
        at: (where(rows["layers"], layer=at[0], steps=at[1]), per_cent(published))
        for at, (_, published, _) in layers.PAPER.items()
    }
    reached = [reaches(share_of(own), share) for own, share in found.values()]
    fresh = {layer: own for (layer, steps), (own, _) in found.items() if not steps}
    times = {layer: statistics.median(map(time_of, own)) for layer, own in fresh.items() if own}
    run = [row for own in fresh.values() for row in own]
    ours = f"layers 1 to 5 together: {told(share_of(run))} exact"
    if times:
        first, last = min(times), max(times)
        ours += f"; {times[first]:.2f} s at layer {first}, {times[last]:.2f} s at layer {last}"
    later = [row for (_, steps), (own, _) in found.items() for row in own if steps]
    ours += f"; layer 5 of a trained network: {told(share_of(later))} exact"
    return ours, Verdict.by(all(reached), not any(reached))


def one_class(rows: AllRows) -> tuple[str, Verdict]:
    rate = share_of(rows["one_label"])
    return f"{told(rate)} exact", Verdict.by(reaches(rate, 0.98), not reaches(rate, 0.5))


def people(rows: AllRows) -> tuple[str, Verdict]:
    own = where(rows["tabular"], b=16)
    discrete, numbers = metric(own, "discrete"), metric(own, "continuous")
    if not numbers:
        return NOT_RUN, Verdict.OPEN
    right, error = statistics.fmean(discrete), statistics.fmean(numbers)
    whole = told(share_of(own))
    ours = f"b = 16: {100 * right:.4g} % of categories, MAE {decimal(error)}, {whole} exact"
    larger = [f"b = {b}: {told(share_of(where(rows['tabular'], b=b)))}" for b in (24, 32)]
    return f"{ours}; {', '.join(larger)}", Verdict.by(right == 1 and error <= 20.4, right < 0.97)


def prior(rows: AllRows) -> tuple[str, Verdict]:
    found = {
        b: share_of(where(rows["prior"], method="prior", b=b))
        for b in values_of(rows["prior"], "b")
    }
    alone = share_of(where(rows["prior"], method="cascade"))
    parts = [f"b = {b}: {told(rate)}" for b, rate in found.items()]
    reached = [reaches(rate, {50: 1.0, 100: 0.6}.get(b, 1.0)) for b, rate in found.items()]
    enough = all(rate.trials >= FEW for rate in found.values())
    ours = f"with the prior, {'; '.join(parts)}; our finder without one: {told(alone)}"
    return ours, Verdict.by(all(reached) and enough, not any(reached))


def features(rows: AllRows) -> tuple[str, Verdict]:
    values = metric(where(rows["features"], attack="spear"), "cosine")
    if not values:
        return NOT_RUN, Verdict.OPEN
    similar = statistics.fmean(values)
    ours = f"mean cosine {similar:.4f}, {len(values)} batch{'es' * (len(values) != 1)}"
    return ours, Verdict.by(similar >= 0.984 and len(values) >= FEW, similar < 0.939)


def trained(rows: AllRows) -> tuple[str, Verdict]:
    own = where(rows["training"], finder="overlapping", threshold=None)
    fresh, later = (
        [r for r in own if bool(r.settings["steps"]) is after] for after in (False, True)
    )
    once, found = share_of(fresh, "matched"), share_of(later, "matched")
    cascade = [
        row for row in where(rows["training"], finder="cascade") if row.settings["steps"] > 0
    ]
    before, after = (quantile(counts(part), 0.5) if part else math.nan for part in (fresh, later))
    ours = (
        f"the paper's finder: {told(found)} found after training, median {after:,.0f} submatrices "
        f"(before it {told(once)}, {before:,.0f}); our finder: {told(share_of(cascade))} exact"
    )
    as_often = found.interval()[1] >= once.interval()[0] and min(found.trials, once.trials) >= FEW
    return ours, Verdict.by(as_often and after <= before, (found.share or 0.0) < 0.5)


CLAIMS = (
    Claim(
        "Whole batches of 20 come back exactly",
        "99 % of batches, five datasets (Table 3)",
        "confirmed if the 95 % interval of every dataset and finder reaches 99 %, with "
        f"{FEW} batches or more of each finder; refuted if none does",
        ("main",),
        accuracy,
    ),
    Claim(
        "The gradient's rank is b, and the right batch has λ = 1",
        "Section 5.1, Definition 4.1",
        "confirmed if so in every row; refuted if in fewer than half",
        ("main",),
        spectrum,
    ),
    Claim(
        "Accuracy does not depend on width and depth, and wider layers need fewer submatrices",
        "Figure 5",
        "confirmed if no two networks with m ≥ 10 b have intervals apart, with "
        f"{FEW} batches or more of each network, and the median count falls from the narrowest to "
        "the widest; refuted if two such intervals are apart",
        ("architecture",),
        shape_of_network,
    ),
    Claim(
        "Lemma 5.2 gives the number of submatrices of wide layers",
        "“excellent agreement”, 1.8 × 10⁵ at b = 16 (Figure 4)",
        "confirmed if the mean count is within a factor of two of the lemma's wherever that is "
        f"{AT_ONCE:,} or more (below, the paper's figure is flat: it looks at as many at once, and "
        "the lemma's q is a lower bound); refuted if it is not at the largest b",
        ("batch_size",),
        submatrices,
    ),
    Claim(
        "A narrow layer (m = 200) takes about 20 times as many as a wide one (2000)",
        "Section 6.2",
        "confirmed if the factor lies between 10 and 40 at every b from 16 on, counted and by "
        "theory (`theory.expected_samples_narrow`); refuted if it is below 10 at every b; a factor "
        "that grows with b makes it qualified",
        ("batch_size",),
        narrow,
    ),
    Claim(
        "Exhaustive sampling fails less often than Lemma 5.3's bound",
        "“an upper bound on the failure probability”; “always lies below” (Figure 8)",
        "refuted if a probability of failure that follows from the lemma's own assumptions "
        "(independent entries, half of them zero: some column is zero wherever another is, "
        "`theory.failure_at_least`) is above the bound at a size of Figure 8, which needs no rows, "
        "or if a count with the lemma's distribution is, at 95 % for all sizes together; "
        "confirmed if neither is, nor a count with real batches",
        ("failure_validation",),
        failure,
    ),
    Claim(
        "The second stage of the greedy choice makes more batches exact, the more so the larger b",
        "“increasingly important for larger batch size” (Figure 6)",
        "on the same candidates. Confirmed if more batches are exact only with it than only "
        "without it, and in no smaller a share of the batches above the median size than of the "
        "others; refuted if not more, and no more runs have more samples right than have fewer",
        ("two_stages",),
        second_stage,
    ),
    Claim(
        "Clipping each sample's whole gradient changes nothing",
        "118.0 to 118.7 dB, 100 % for C = 1 to 2 (Table 9)",
        "confirmed if every batch is exact and mean PSNRs are within 1 dB; refuted if "
        "intervals of two C are apart, or that of all does not reach 50 %. Clipping layer by "
        "layer is another matter (Settings, per-layer clipping)",
        ("dpsgd",),
        clipping,
    ),
    Claim(
        "Noise as large as the gradient still leaves more than 28 dB",
        "28.7 to 29.9 dB at σ = 10⁻⁴ (Table 9)",
        "confirmed if the mean PSNR is above 28 dB at every C; refuted if below 20 dB at every C",
        ("dpsgd",),
        noise,
    ),
    Claim(
        "Only noise that impedes training would protect",
        "Appendix E.6, as a suggestion",
        "confirmed if no noise that was tried hides every sample in a single update; else "
        "qualified, as these rows do not say what training loses (the example in Auditing does)",
        ("rounds_noise",),
        defence,
    ),
    Claim(
        "FedAvg updates are inverted as well",
        "90 to 100 % of batches (Tables 10 and 11)",
        "confirmed if the 95 % interval of every setting reaches the paper's share; refuted if "
        "none does",
        ("fedavg_epochs", "fedavg_rates"),
        fedavg,
    ),
    Claim(
        "Sampling takes exponential time, which prevents recovery beyond b of about 25",
        "“a bottleneck that prevents the recovery” for b > 25 (Section 6.3; Sections 1, 8)",
        "counts of sampling that grow by 0.8 to 1.2 doublings a sample confirm it, less refute it. "
        "It becomes qualified, as said of sampling and not of the problem, where another finder "
        f"recovers 95 % of at least {FEW} larger batches",
        ("batch_size", "frontier"),
        exponential,
    ),
    Claim(
        "Secure aggregation over many clients makes recovery intractable",
        "“might prove instrumental” (Section 9)",
        "for sums of nearly as many samples as neurons, or more: fewer come back like one client's. "
        "Confirmed if nothing came back after any number of rounds; refuted if samples came back "
        "after a single one; qualified if only after several",
        ("rounds_aggregation",),
        aggregation,
    ),
    Claim(
        "Inputs of any layer followed by a ReLU come back",
        "100, 100, 100, 99 and 83 % (Table 4), 70 min at layer 5; over 95 % there after training",
        "confirmed if every layer's 95 % interval reaches the paper's share, also that of layer 5 "
        "after 5,000 steps; refuted if none does",
        ("layers",),
        any_layer,
    ),
    Claim(
        "Labels do not matter: batches of a single class",
        "98 % (Table 8)",
        "confirmed if the 95 % interval reaches 98 %; refuted if not even 50 %",
        ("one_label",),
        one_class,
    ),
    Claim(
        "Rows of a table come back",
        "100 % of categories, MAE 20.4 at b = 16 (Table 2)",
        "confirmed if both are as good; refuted if fewer than Tableak's 97 % of categories are "
        "right",
        ("tabular",),
        people,
    ),
    Claim(
        "An approximate guess makes b = 100 practical",
        "100 % at b = 50, 60 % at b = 100 (Table 5)",
        f"confirmed if both intervals reach that, with {FEW} batches each or more; refuted if "
        "none does",
        ("prior",),
        prior,
    ),
    Claim(
        "Features before a CNN's first linear layer come back almost perfectly",
        "0.984 (Table 6)",
        f"confirmed if the mean cosine is as high, over {FEW} batches or more; refuted if below "
        "the cocktail party attack's 0.939",
        ("features",),
        features,
    ),
    Claim(
        "Trained networks are inverted as well, with fewer submatrices",
        "“performs very well”, “drops slightly” around 1,000 steps (Figure 7)",
        "confirmed if the paper's finder finds as many batches as before training (intervals not "
        f"apart, {FEW} batches or more of each), with no more submatrices in the median; refuted if "
        "it finds fewer than half",
        ("training",),
        trained,
    ),
)
_INTRO = (
    "Each verdict follows from the rows by the rule below, anew whenever the page is drawn. "
    "Intervals are 95 % Clopper-Pearson, and few batches make them wide: “confirmed” says that "
    "the rows agree with the claim, and the interval how much they could have missed. Rows are of "
    "our finder where a line does not name the paper's or count submatrices: they say what an "
    "update gives away, not that Algorithm 1 finds it as fast or at all."
)


def draw(rows: AllRows) -> Section:
    made = table("Claim, The paper, Ours, Verdict, Where", [claim.line(rows) for claim in CLAIMS])
    rules = "\n".join(f"- {claim.words}: {claim.rule}." for claim in CLAIMS)
    return Section([made], notes=[_INTRO, f"How a verdict follows:\n\n{rules}"])


EXPERIMENT = Experiment(
    place="Summary",
    title="The paper's claims",
    batches=0,
    draw=draw,
    after=tuple(dict.fromkeys(source for claim in CLAIMS for source in claim.sources)),
)
