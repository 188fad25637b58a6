"""A sweep's report: the verdict, where leakage starts and stops, what defences cost, and examples."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spear.errors import MissingExtra
from spear.inversion import Outcome
from spear.report import (
    Case,
    Cell,
    Finding,
    Level,
    Measured,
    Remark,
    Report,
    Table,
    safe_settings,
)
from spear.sweep import utility
from spear.sweep.leakage import Leakage, LeakageLevel, percent, trend
from spear.sweep.plan import Sweep
from spear.sweep.plots import drawings
from spear.sweep.private_data import PrivateData
from spear.sweep.setting import Setting
from spear.sweep.trial import BEYOND_FLAT_DB, OTHER_DB, PICTURE_DB


def leakage_table(sweep: Sweep, found: Sequence[Leakage]) -> Table:
    """What leaked at each setting, and what each costs: what a reader compares."""
    classes = sweep.subject.samples().classes is not None
    base, (unit, digits) = sweep.grid.base, (100, 1) if classes else (1, 4)

    columns: dict[str, Callable[[Leakage], Cell]] = {
        "setting": lambda a: setting_name(a, base),
        "verdict": lambda a: a.verdict.value,
        "leaks, %": lambda a: _rounded(a.leaked.share, 100),
        "95 % interval": _interval,
        "exact, %": lambda a: _rounded(a.exact.share, 100),
        "best, dB": lambda a: _rounded(a.best),
        "accuracy, %" if classes else "held-out loss": lambda a: _rounded(
            getattr(a.utility, "quality", None), unit, digits
        ),
        "cost, points" if classes else "cost, loss": lambda a: _cost(a, unit, digits),
    }
    if any(leakage.noise.epsilon is not None for leakage in found):
        columns["ε"] = _epsilon
    caption = (
        f"{sweep.repeats} private batches per setting, each with weights of its own. A setting is "
        "named by what differs from the base: b samples in a batch, lr the local learning rate, C the "
        "clipping norm, z the noise multiplier, σ the noise, ε the privacy budget. Leaks: share of "
        "batches from which anything came back; exact: of those that came back whole; best: PSNR of "
        "the best sample; cost: what a defence takes off the held-out "
        + ("accuracy." if classes else "loss.")
    )
    return _table("Leakage and cost", columns, found, caption)


def samples_table(sweep: Sweep, found: Sequence[Leakage]) -> Table:
    """The same by samples, and the time it took."""
    base = sweep.grid.base
    columns: dict[str, Callable[[Leakage], Cell]] = {
        "setting": lambda a: setting_name(a, base),
        "batches": lambda a: len(a.done),
        "samples exact, %": lambda a: _rounded(a.share("recovered"), 100),
        "recognisable, %": lambda a: _rounded(a.share("recognised"), 100),
        "seconds": lambda a: _rounded(a.seconds, digits=2),
        "out of time": lambda a: a.out_of_time,
    }
    caption = "Shares of all samples; seconds are the median of the attacks, for each batch."
    return _table("Samples and time", columns, found, caption)


def _cost(leakage: Leakage, unit: float, digits: int) -> str | None:
    cost = _rounded(getattr(leakage.utility, "cost", None), unit, digits)
    spread = _rounded(getattr(leakage.utility, "cost_spread", None), unit, digits)
    return None if cost is None else f"{cost + 0.0:g}" + (f" ± {spread:g}" if spread else "")


def _epsilon(leakage: Leakage) -> float | None:
    return leakage.noise.epsilon and float(f"{leakage.noise.epsilon:.4g}")


def _interval(leakage: Leakage) -> str | None:
    if not leakage.done:
        return None
    low, high = leakage.leaked.interval()
    return f"{100 * low:.0f}\u2013{100 * high:.0f}"


def settings_table(sweep: Sweep, found: Sequence[Leakage]) -> Table:
    """Every setting in full; what is the same at all of them is left out, for it is in the base."""
    base = sweep.grid.base
    columns: dict[str, Callable[[Leakage], Cell]] = {
        "setting": lambda a: setting_name(a, base),
        "batch": lambda a: a.setting.samples,
        "width": lambda a: a.setting.width,
        "protocol": lambda a: a.setting.training,
        "C": lambda a: a.setting.clip,
        "σ": lambda a: a.noise.sigma and float(f"{a.noise.sigma:.4g}"),
        "z": lambda a: a.noise.multiplier and float(f"{a.noise.multiplier:.4g}"),
        "ε": _epsilon,
        "precision": lambda a: a.setting.precision,
        "pruned": lambda a: a.setting.pruned,
        "clients": lambda a: a.setting.clients,
        "rounds": lambda a: a.setting.rounds,
    }
    varied = {
        name: value
        for name, value in columns.items()
        if name == "setting" or len({value(leakage) for leakage in found}) > 1
    }
    caption = (
        "What differs between the settings, with noise in every unit that is defined for it: C the "
        "clipping norm, σ the noise on each entry sent, z the noise multiplier, ε at its δ."
    )
    return _table("Settings", varied, found, caption)


def _table(
    title: str,
    columns: Mapping[str, Callable[[Leakage], Cell]],
    found: Sequence[Leakage],
    caption: str,
) -> Table:
    rows = tuple(tuple(value(leakage) for value in columns.values()) for leakage in found)
    return Table(title, tuple(columns), rows, caption)


def setting_name(leakage: Leakage, base: Setting) -> str:
    """A setting, named by what differs from the base."""
    own = leakage.setting == base
    return f"base: {leakage.setting.words()}" if own else leakage.setting.words(base)


def _rounded(value: float | None, unit: float = 1, digits: int = 1) -> float | None:
    return None if value is None else round(unit * value, digits)


_TABLES = (leakage_table, samples_table, settings_table)
NO_GUARANTEE = "not a guarantee: another attack, or more batches, may do better"
# Subjects of remarks that explain the figures; all others are about this run.
EXPLANATIONS = ("what counts", "utility", "epsilon", "rounds")
_LEARNT = 0.03  # accuracy above guessing from which a model counts as trained
_OUTCOMES = {
    LeakageLevel.EXACT: Outcome.EXACT,
    LeakageLevel.SINGLE: Outcome.PARTIAL,
    LeakageLevel.RECOGNISABLE: Outcome.APPROXIMATE,
    LeakageLevel.BLURRED: Outcome.APPROXIMATE,
    LeakageLevel.UNDECIDED: Outcome.INCONCLUSIVE,
    LeakageLevel.NOTHING: Outcome.FAILED,
}
_EXIT = {
    Outcome.EXACT: 20,
    Outcome.PARTIAL: 10,
    Outcome.APPROXIMATE: 10,
    Outcome.INCONCLUSIVE: 30,
    Outcome.FAILED: 0,
}


def exit_code(found: Sequence[Leakage]) -> int:
    """Of the worst setting: 20 if a whole batch was exact, 10 if anything came back, 30 if the attack
    cannot tell, 0 if nothing came back."""
    worst = _overall(found)
    return 0 if worst is None else _EXIT[worst]


def sweep_report(
    sweep: Sweep,
    out: Path,
    *,
    examples: Sequence[Finding] = (),
    settings: Mapping[str, Any] | None = None,
    seconds: float | None = None,
    interrupted: bool = False,
) -> Report:
    """The report on the rows in `out`; nothing is run. Of an interrupted run it says so."""
    found, data = sweep.summary(out), sweep.subject.samples()
    classes = data.classes is not None
    cases = [case_of(leakage, sweep.grid.base, classes) for leakage in found]
    remarks = [
        *_along_axes(sweep, found),
        *_safe(found, classes),
        *_method_remarks(sweep, found),
        *_over_rounds(sweep, found),
    ]
    try:
        drawn = drawings(sweep, found)
    except MissingExtra as error:
        drawn = ()
        remarks.append(Remark(Level.NOTE, "plots", f"Not drawn: {error}"))
    told = headline(found, cases)
    if interrupted:
        told = f"Interrupted, so far: {told}"
        remarks.insert(0, _left(sweep, out))
    return Report.new(
        "audit",
        "Where leakage starts and stops",
        told,
        examples,
        remarks=remarks,
        tables=tuple(table(sweep, found) for table in _TABLES),
        drawings=drawn,
        settings={
            "model": sweep.subject.model_words,
            "data": data.name,
            "samples in the data": len(data),
            "batches at each setting": sweep.repeats,
            "seconds for an attack, at most": sweep.max_seconds,
            "training steps before the attack": sweep.subject.trained_steps,
            "base": sweep.grid.base.words(),
            "seed": sweep.seed,
            **(settings or {}),
        },
        seconds=seconds,
        overall=_overall(found),
        cases=cases,
    )


def _left(sweep: Sweep, out: Path) -> Remark:
    """How much of the run was done when it was interrupted."""
    parts = sweep.parts(out)
    done, total = sum(len(part.rows) for part in parts), sum(len(part.trials) for part in parts)
    words = (
        f"{done} of {total} attacks and training runs are in it; the same command does the others."
    )
    return Remark(Level.NOTE, "interrupted", words)


def case_of(leakage: Leakage, base: Setting, classes: bool) -> Case:
    """The verdict on one setting; one that was not measured cannot be told."""
    outcome = _OUTCOMES.get(leakage.verdict, Outcome.INCONCLUSIVE)
    words = leakage.verdict.value.capitalize()
    if leakage.done:
        words += f": {percent(leakage.leaked)} leaked"
    name = setting_name(leakage, base)
    return Case(name, outcome, f"{words}.", _measured(leakage, classes))


def _measured(leakage: Leakage, classes: bool) -> Measured | None:
    if not leakage.done:
        return None
    unit, words = (100, "points of accuracy") if classes else (1, "of loss")
    cost, spread = (
        value and unit * value
        for value in (
            getattr(leakage.utility, "cost", None),
            getattr(leakage.utility, "cost_spread", None),
        )
    )
    return Measured(
        leakage.leaked.count, len(leakage.done), leakage.out_of_time, cost, spread, words
    )


def _overall(found: Sequence[Leakage]) -> Outcome | None:
    verdicts = {leakage.verdict for leakage in found if leakage.done}
    for verdict, outcome in _OUTCOMES.items():
        if verdict in verdicts:
            return outcome
    return None


def headline(found: Sequence[Leakage], cases: Sequence[Case]) -> str:
    """Which settings are safe, and what happened at the others.

    >>> headline([], [])
    'Nothing was measured.'
    """
    done = [leakage for leakage in found if leakage.done]
    if not done:
        return "Nothing was measured."
    exact, single, recognisable, blurred = (
        sum(leakage.verdict is level for leakage in done)
        for level in (
            LeakageLevel.EXACT,
            LeakageLevel.SINGLE,
            LeakageLevel.RECOGNISABLE,
            LeakageLevel.BLURRED,
        )
    )
    others = single + recognisable
    parts = [f"whole batches came back exactly at {exact}"] if exact else []
    parts += [f"something recognisable at {others}"] if others else []
    parts += [f"something blurred at {blurred}"] if blurred else []
    words = safe_settings(cases)
    if parts:
        told = ", ".join([*parts[:-2], " and ".join(parts[-2:])])
        words += f" {told[0].upper()}{told[1:]}."
    if len(done) < len(found):
        words += f" {len(found) - len(done)} of {len(found)} settings are not measured yet."
    return words


def _along_axes(sweep: Sweep, found: Sequence[Leakage]) -> list[Remark]:
    remarks = []
    quiet = {LeakageLevel.NOTHING, LeakageLevel.UNDECIDED, LeakageLevel.UNMEASURED}
    for axis in sweep.grid.axes:
        words, own = trend(axis, found), {setting for _, setting in axis.points}
        verdicts = {a.verdict for a in found if a.setting in own}
        if words:
            level = Level.PROTECTED if verdicts == {LeakageLevel.NOTHING} else Level.NOTE
            level = Level.EXPOSED if verdicts - quiet else level
            remarks.append(Remark(level, axis.title, f"{words[0].upper()}{words[1:]}."))
    return remarks


def _safe(found: Sequence[Leakage], classes: bool) -> list[Remark]:
    """Remarks on the settings at which nothing was recovered, worded with care."""
    remarks = []
    base = found[0].setting if found else None
    for leakage in found:
        if leakage.verdict not in (LeakageLevel.NOTHING, LeakageLevel.UNDECIDED):
            continue
        words = f"This attack recovered nothing: {percent(leakage.leaked)} leaked"
        if leakage.out_of_time:
            words += f", though in {leakage.out_of_time} of them the time limit stopped it"
        elif leakage.undecided:
            reason = leakage.undecided[0].metrics["reason"].removesuffix(".")
            words += f", though in {len(leakage.undecided)} of them it cannot tell ({reason})"
        measured = _measured(leakage, classes)
        words += f"; {NO_GUARANTEE}."
        if measured is not None and measured.cost is not None:
            words += f" Its cost in training: {measured.price}."
        if leakage.noise.epsilon is not None:
            words += f" Its ε is {leakage.noise.epsilon:,.3g}: only a small one is a guarantee."
        level = Level.NOTE if leakage.undecided else Level.PROTECTED
        remarks.append(Remark(level, leakage.setting.words(base), words))
    return remarks


def _method_remarks(sweep: Sweep, found: Sequence[Leakage]) -> list[Remark]:
    """What the figures mean, and what they do not."""
    data = sweep.subject.samples()
    told = [_what_counts(data)]
    too_small = utility.too_small(len(data), sweep.grid.base)
    if not sweep.training.rounds or too_small:
        words = too_small or "training was switched off"
        told.append(Remark(Level.NOTE, "utility", f"Not measured: {words}."))
    else:
        what = "accuracy" if data.classes is not None else "loss"
        told.append(
            Remark(
                Level.NOTE,
                "utility",
                f"Held-out {what} after {sweep.training.rounds} rounds under the same protocol, mean "
                f"of {sweep.training.seeds} runs; cost is against the same runs without clipping, "
                "noise and compression. This is a small proxy: it shows which settings ruin training, "
                "no more.",
            )
        )
        told += _unlearnt(sweep, found)
    told += _epsilon_remark(sweep, found)
    wrong = sum(leakage.certified_wrong for leakage in found)
    if wrong:
        told.append(Remark(Level.NOTE, "certificate", f"{wrong} samples were certified but wrong."))
    for leakage in found:
        if leakage.failed:
            words = f"{len(leakage.failed)} trials gave no result: {leakage.failed[0].error}"
            told.append(Remark(Level.NOTE, leakage.setting.words(), words))
    return told


def _epsilon_remark(sweep: Sweep, found: Sequence[Leakage]) -> list[Remark]:
    """What the epsilons of the settings cover."""
    if all(leakage.noise.epsilon is None for leakage in found):
        return []
    words = (
        f"By Opacus' RDP accountant {sweep.privacy.words()}. FedSGD: per sample (DP-SGD); FedAvg: "
        "for the client's whole update. More updates mean a larger epsilon. Each client "
        "adds its own noise, before aggregation."
    )
    if any(leakage.setting.rounds > sweep.privacy.steps for leakage in found):
        words += " Where more rounds are attacked, it covers these."
    return [Remark(Level.NOTE, "epsilon", words)]


def _what_counts(data: PrivateData) -> Remark:
    """When a batch leaks, and what a verdict is where none does."""
    unit = (
        f"a picture is recognisable from {PICTURE_DB:.0f} dB PSNR on, if it also beats "
        f"the best flat colour by {BEYOND_FLAT_DB:.0f} dB"
        if data.image_format is not None
        else "the data are not pictures: errors are in standard deviations of each feature, and a "
        f"sample is recognisable from {OTHER_DB:.0f} dB on, that is within 0.32 of one"
    )
    return Remark(
        Level.NOTE,
        "what counts",
        f"A batch leaks if any of its samples is recognisable, exact or certified: {unit}; exact is 60 "
        "dB. Where none does, the verdict is the attack's own: blurred if it says that samples came "
        "back, cannot tell, or nothing recovered. Intervals are Clopper-Pearson at 95 %, over batches.",
    )


def _over_rounds(sweep: Sweep, found: Sequence[Leakage]) -> list[Remark]:
    """What a trial of several rounds is, and where not all of them could be used."""
    several = [leakage for leakage in found if leakage.setting.rounds > 1]
    if not several:
        return []
    gradients = any(leakage.setting.sends == "gradient" for leakage in several)
    rate = f" (gradients at a learning rate of {sweep.subject.server_lr:g})" if gradients else ""
    words = (
        "In each round the clients send an update of the same batch, and the server moves the model by "
        f"it{rate}. All rounds are attacked together. Utility does not depend on their number."
    )
    told = [Remark(Level.NOTE, "rounds", words)]
    for leakage in several:
        used = [row.metrics["rounds_used"] for row in leakage.done if "rounds_used" in row.metrics]
        if used and min(used) < leakage.setting.rounds:
            words = (
                f"Of {leakage.setting.rounds} rounds only {min(used)} could be used together. Likely "
                "causes: an inner layer, whose inputs change as the layers before it are trained, or "
                "noise."
            )
            told.append(Remark(Level.NOTE, leakage.setting.words(), words))
    return told


def _unlearnt(sweep: Sweep, found: Sequence[Leakage]) -> list[Remark]:
    """A warning if even undefended training did not beat guessing, so that costs mean nothing."""
    guessing = sweep.subject.samples().commonest
    plain = [a.utility.quality for a in found if a.utility and not a.setting.defended]
    if guessing is None or not plain or max(plain) > guessing + _LEARNT:
        return []
    words = (
        f"Without any defence the model reached {100 * max(plain):.0f} %, while guessing the "
        f"commonest class gives {100 * guessing:.0f} %: it did not learn, so the costs mean nothing. "
        "Give more --training-rounds, or another --server-lr."
    )
    return [Remark(Level.NOTE, "training", words)]
