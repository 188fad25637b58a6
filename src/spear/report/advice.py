"""What to do now: settings found safe, the next command, and mitigations with their measured cost.

It is made here and nowhere else, from what a report holds: a report of any age has it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from spear.inversion import Outcome
from spear.judge import Cause
from spear.report.finding import Finding
from spear.report.report import SEVERITY, Case, Measured, Report, Step

TITLE = "What to do now"
MOST_SAFE = 5  # settings that are named in a sentence or on a terminal; pages and JSON have all


class Door(Enum):
    """Where a report was made, and so in which words its reader is told what to do."""

    COMMAND_LINE = "command line"
    PYTHON = "Python"
    FLOWER = "Flower"
    NVFLARE = "NVFlare"


@dataclass(frozen=True)
class Advice:
    """What to do now.

    Args:
        found: what is known of safe settings, in a sentence.
        safe: the settings at which nothing was recovered, the cheapest first.
        steps: what to do next, the first thing first.
        mitigations: defences that kept some batch from leaking, those that held first.
        source: where they were measured.
    """

    found: str
    safe: tuple[Case, ...]
    steps: tuple[Step, ...]
    mitigations: tuple[Case, ...]
    source: str


def advice(report: Report) -> Advice:
    """What to do now, after this report."""
    if any(case.measured for case in report.cases):
        return _after_a_sweep(report)
    if report.kind == "check":
        steps = [*report.steps, _sweep(report, None)]
    else:
        steps = list(report.steps) or _after_findings(report)
    return Advice(_one_setting(report), (), tuple(steps), PUBLISHED, _SOURCE)


def door(report: Report) -> Door:
    """Where it was made: by the command line it has in its settings, in a framework, or in Python."""
    if report.kind in _FRAMEWORKS:
        return _FRAMEWORKS[report.kind]
    return Door.PYTHON if _command(report) is None else Door.COMMAND_LINE


def how_to_redact(report: Report) -> str:
    """That the report holds data, and how to leave it out, in the words of its door."""
    if report.kind == "demo":
        return (
            "The photos on this page are public. For your clients' data, spear invert has --redact."
        )
    if door(report) is Door.FLOWER:
        how = "give redact=True to Audited or what_leaves"
    elif door(report) is Door.NVFLARE:
        how = "give redact=True to AuditFilter"
    elif door(report) is Door.COMMAND_LINE:
        how = "the same command with --redact"
    elif report.kind == "inversion":
        how = 'result.report("redacted.html", redact=True)'
    else:
        how = 'report.redacted().save_page("redacted.html")'
    return f"{_HOLDS_DATA} To leave it out: {how}."


_FRAMEWORKS = {"flower": Door.FLOWER, "nvflare": Door.NVFLARE}  # by the kinds of their reports
_HOLDS_DATA = "It holds clients' data, recovered or original: handle it as you would that data."

# From docs/audit.md, the built-in sweep; a test compares them with the page.
PUBLISHED = (
    Case("C = 1, ε = 8", Outcome.FAILED, "", Measured(0, 5, cost=8.9, spread=1.1)),
    Case("12 clients aggregated", Outcome.INCONCLUSIVE, "", Measured(0, 5, cost=0.0, spread=0.0)),
    Case("50% pruned", Outcome.INCONCLUSIVE, "", Measured(0, 5, cost=-1.6, spread=1.7)),
    Case("8-bit", Outcome.PARTIAL, "", Measured(3, 5, cost=1.0, spread=0.3)),
    Case("4 clients aggregated", Outcome.EXACT, "", Measured(5, 5, cost=0.0, spread=0.0)),
    Case("C = 1", Outcome.EXACT, "", Measured(5, 5, cost=6.8, spread=5.0)),
)
_SOURCE = (
    "Not of this model: measured by the built-in sweep (spear docs audit: width 200, photos, 8 samples "
    "per client, 5 batches at each setting; C is the clipping norm). Only noise, with its ε, comes "
    "with a guarantee. spear audit measures your own."
)
_MEASURED_HERE = "Measured by this sweep; cost is against the same training without defences."

_PHOTOS = 800  # of the built-in data of `spear audit`
_BATCH, _LARGEST_BATCH = 8, 64  # where the batch size is not known; what the photos allow for
_NOISE: Mapping[str, Any] = {"clip": 1.0, "noise_multiplier": 0.1}  # what is rehearsed
_LISTS: Mapping[str, tuple[Any, ...]] = {
    "clip": (None, 1.0),
    "noise_multiplier": (0, 0.01, 0.1),
    "clients": (1, 4, 12),
}
_TRAINING = ("epochs", "local_batch_size", "lr")  # of a protocol, what a sweep takes as well
_REHEARSED = (  # of a protocol, what `spear check` takes as well
    *("samples", "lr", "epochs", "local_steps", "local_batch_size", "momentum", "weight_decay"),
    *("proximal", "optimizer", "clients", "precision", "pruned"),
)
_LOCAL = {"lr", "epochs", "local_steps"}  # any of them says that clients train and send weights
_MORE_BATCHES = 30  # with none of them leaking, at most 12 % leak, at 95 % confidence
_MORE_TIME = 10  # times as long
_SECONDS = 600.0  # where no limit is known


class _Line:
    """A command line of ours, as words."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)

    def __str__(self) -> str:
        return shlex.join(self.words)

    def value(self, *names: str) -> str | None:
        """The value of an option, under any of its names."""
        for word, following in zip(self.words, [*self.words[1:], ""], strict=True):
            name, equals, value = word.partition("=")
            if name in names:
                return value if equals else following
        return None

    def without(self, *flags: str) -> _Line:
        """The same line without options that have no value."""
        return _Line([word for word in self.words if word not in flags])

    def without_values(self, *names: str) -> _Line:
        """The same line without options and their values."""
        before = zip(["", *self.words], self.words, strict=False)
        return _Line([w for b, w in before if b not in names and w.partition("=")[0] not in names])

    def given(self, name: str, value: object = None) -> _Line:
        """The same line with an option, in place of its former value."""
        kept, words = [], iter(self.words)
        for word in words:
            if word == name and value is not None:
                next(words, None)
            elif word != name and not word.startswith(f"{name}="):
                kept.append(word)
        return _Line([*kept, name, *([] if value is None else [str(value)])])


def command_with(given: object, options: Mapping[str, Any]) -> str:
    """A command line of ours with these arguments in place of their former values; else nothing.

    It is louder than it was, and writes over no report.

    >>> command_with("spear check -q --report x.html --clip 2", {"clip": 1, "noise_multiplier": 0.1})
    'spear check --clip 1 --noise-multiplier 0.1'
    >>> command_with("spear check -b 4", {"max_seconds": 300.0})
    'spear check -b 4 --max-seconds 300'
    """
    line = _parsed(given)
    if line is None:
        return ""
    line = line.without("-q", "--quiet").without_values("--report", "--json", "--junit", "--sarif")
    for name, value in options.items():
        text = f"{value:g}" if isinstance(value, float) else value
        line = line.given(f"--{name.replace('_', '-')}", text)
    return str(line)


def _command(report: Report) -> _Line | None:
    """The command line that made the report, if it is one of ours."""
    return _parsed(report.settings.get("command"))


def _parsed(given: object) -> _Line | None:
    try:
        words = shlex.split(given) if isinstance(given, str) else []
    except ValueError:  # not a command line after all
        return None
    return _Line(words) if words[:1] == ["spear"] else None


def _one_setting(report: Report) -> str:
    """What a report on one setting can say of safe ones."""
    worst = report.worst
    if worst is Outcome.FAILED:
        return (
            "Only that of this report, as far as this attack can tell: one trial is no guarantee."
        )
    if worst is None or worst is Outcome.INCONCLUSIVE:
        return "None is known: this report could not tell."
    return "None is known: the setting of this report is not safe, and no other was measured."


def _after_findings(report: Report) -> list[Step]:
    """After updates that were attacked: by the outcome of the worst, and its cause."""
    if not report.findings:
        return [_sweep(report, None)]
    found = max(report.findings, key=lambda finding: SEVERITY.index(finding.outcome))
    stopped = bool(found.stats.get("interrupted")) and found.outcome is not Outcome.EXACT
    if stopped or found.cause is Cause.INTERRUPTED:
        return [_again(report)]
    if found.cause is Cause.TIME:
        return [_longer(_command(report))]
    if found.outcome is Outcome.INCONCLUSIVE:
        first = _rehearsed(report, found, {}, _WHICH_LAYER)
    elif found.outcome is Outcome.FAILED:
        first = _rehearsed(report, found, {"rounds": 10}, _ROUNDS)
    elif found.protocol.keys() & {"sigma", "noise_multiplier"}:
        first = []  # it had noise, which was not enough
    else:
        first = _rehearsed(report, found, _NOISE, _WITH_NOISE)
    return [*first, _sweep(report, found)]


_WHICH_LAYER = "See which layers of the model can be attacked, and what stands in the way:"
_JUDGED_ANYWAY = (
    "Rehearse the attack on this model with made-up data, where the answer can be told:"
)
_ROUNDS = "Rehearse what ten rounds of the same data give away together:"
_WITH_NOISE = (
    "Rehearse on this model whether clipping and noise on the client would stop it (seconds):"
)
_SWEEP = (
    "Measure which settings stop it, and what they cost in accuracy (minutes), on a built-in network "
    "and photos; add {} for yours:"
)


def _again(report: Report) -> Step:
    line = _command(report)
    if line is not None:
        return Step("The run was stopped. The same command runs it again:", str(line))
    return Step("The run was stopped: run it again, to its end.")


def _longer(line: _Line | None) -> Step:
    if line is None:
        return Step(f"It ran out of time: run it again with max_seconds={_SECONDS:g} or more.")
    try:
        seconds = _MORE_TIME * float(line.value("--max-seconds") or "")
    except ValueError:
        seconds = _SECONDS
    return Step("It ran out of time. With more:", str(line.given("--max-seconds", f"{seconds:g}")))


def _rehearsed(report: Report, found: Finding, more: Mapping[str, Any], words: str) -> list[Step]:
    """`spear check` on the files of the command that made the report; nothing where it had none."""
    line = _command(report)
    weights = None if line is None else line.value("--weights", "--round")
    model = None if line is None else line.value("--model")
    if weights is None and model is None:
        return []
    files = {"weights": weights, "model": model, "layer": line and line.value("--layer")}
    told = {name: found.protocol[name] for name in _REHEARSED if name in found.protocol}
    if found.batch_size:
        told = {"samples": found.batch_size, **told}
    if found.protocol.get("sends", "gradient") != "gradient" and not told.keys() & _LOCAL:
        told["epochs"] = 1  # else it would be rehearsed as a gradient
    return [Step(words, _spelled("check", {**files, **told, **more}))]


def _sweep(report: Report, found: Finding | None) -> Step:
    """A sweep around the setting of this report."""
    told = {} if found is None else found.protocol
    size = found.batch_size if found is not None else _of_one_client(report)
    stated = told.get("samples")
    size = size or (stated if isinstance(stated, int) and stated > 0 else _BATCH)
    samples = min(size, _LARGEST_BATCH)
    lists: dict[str, tuple[Any, ...]] = {"samples": (samples,)}
    lists |= {name: (told[name],) for name in _TRAINING if isinstance(told.get(name), int | float)}
    if told.get("sends", "gradient") != "gradient":
        lists = {"samples": (samples,), "epochs": (1,)} | lists
    elif "epochs" not in lists:  # FedSGD has no local training
        lists = {"samples": (samples,)}
    lists |= _LISTS
    lists["clients"] = tuple(k for k in _LISTS["clients"] if k * samples <= _PHOTOS)
    if door(report) is not Door.PYTHON:
        line = _command(report)
        model = (line and line.value("--model")) or "yours.py:Net"
        words = _SWEEP.format(f"--model {shlex.quote(model)} --data FILE.npz (inputs and labels)")
        return Step(words, _spelled("audit", lists))
    spelled = f"sweep(out='spear-audit', workers=0, lists={lists!r})"
    words = _SWEEP.format("subject=Subject(...)")
    return Step(words, f"from spear.sweep import sweep; {spelled}.save_page('audit.html')")


def _of_one_client(report: Report) -> int | None:
    """Samples of one client, as the command of a check told them; else of all that the server sees."""
    line = _command(report)
    told = line and line.value("--samples", "-b")
    if told and told.isdecimal() and int(told):
        return int(told)
    size = report.settings.get("batch_size")
    return size if isinstance(size, int) else None


def _after_a_sweep(report: Report) -> Advice:
    measured = [case for case in report.cases if case.measured]
    safe = sorted((case for case in measured if case.is_safe), key=_price)
    helped = [c for c in measured if c.measured and c.measured.cost is not None and _stopped(c)]
    order = sorted(helped, key=lambda c: (SEVERITY.index(c.outcome), _price(c)))
    missing = len(report.cases) - len(measured)
    found = safe_settings(measured)
    mitigations = (tuple(order), _MEASURED_HERE) if order else (PUBLISHED, _SOURCE)
    return Advice(found, tuple(safe), tuple(_more(report, safe, missing)), *mitigations)


def _is_quiet(case: Case) -> bool:
    return case.outcome in (Outcome.FAILED, Outcome.INCONCLUSIVE)


def _stopped(case: Case) -> bool:
    """Did some batch not leak? Where all of them did, nothing was mitigated."""
    return case.measured is not None and case.measured.leaked < case.measured.batches


def safe_settings(cases: Sequence[Case]) -> str:
    """Which settings are safe, in a sentence or two.

    >>> cases = [Case("b = 96", Outcome.FAILED, "", Measured(0, 5)), *PUBLISHED[-2:]]
    >>> print(safe_settings(cases).replace(". ", ".\\n"))
    Safe from this attack: 1 of 3 settings (b = 96).
    None of 5 batches leaked there, so at most 52 % do (95 % confidence).
    >>> safe_settings(PUBLISHED[-2:])
    'Safe from this attack: none of 2 settings.'
    """
    measured = [(case, case.measured) for case in cases if case.measured]
    safe = [(case.name, one) for case, one in measured if case.is_safe]
    late = [case.name for case, one in measured if _is_quiet(case) and one.out_of_time]
    undecided = [
        case.name
        for case, one in measured
        if case.outcome is Outcome.INCONCLUSIVE and not one.out_of_time
    ]
    of = f"of {len(measured)} setting{'s' * (len(measured) != 1)}"
    words = f"Safe from this attack: none {of}."
    if safe:
        least = Measured(0, min(one.batches for _, one in safe))
        words = (
            f"Safe from this attack: {len(safe)} {of} ({_listed([name for name, _ in safe])}). None of "
            f"{least.batches} batches leaked there, so at most {100 * least.at_most:.0f} % do "
            "(95 % confidence)."
        )
    if late:
        words += f" Nothing came back, but time ran out, at {_listed(late)}: not known to be safe."
    if undecided:
        told = _listed(undecided)
        words += f" Nothing came back, but the attack cannot tell, at {told}: not known to be safe."
    return words


def _listed(names: Sequence[str]) -> str:
    more = [f"{len(names) - MOST_SAFE} more"] if len(names) > MOST_SAFE else []
    return "; ".join([*names[:MOST_SAFE], *more])


def _more(report: Report, safe: Sequence[Case], missing: int) -> list[Step]:
    """What to do after a sweep."""
    line = _command(report)
    line = line and line.without("--only-draw")
    if missing:
        words = f"{missing} of {len(report.cases)} settings are not measured yet"
        same = Step(f"{words}: the same call goes on where it stopped.")
        return [same if line is None else Step(f"{words}. The same command goes on:", str(line))]
    if safe:
        words = f"{_MORE_BATCHES} batches at each setting bound the risk closer"
        if line is None:
            return [Step(f"{words}: repeat the call with repeats={_MORE_BATCHES}.")]
        return [Step(f"{words}; those done are kept:", str(line.given("--repeats", _MORE_BATCHES)))]
    if all(case.outcome is Outcome.INCONCLUSIVE for case in report.cases):
        return [_answered(report, line)]
    words = "Nothing held. Try noise, and the mean of more clients:"
    if line is None:
        return [Step("Nothing held: add noise_multiplier (0, 0.1, 1) and clients (1, 4, 12).")]
    noisy = line.given("--clip", "1").given("--noise-multiplier", "0,0.1,1")
    stronger = noisy.given("--clients", "1,4,12")
    return [Step(words, str(stronger))]


def _answered(report: Report, line: _Line | None) -> Step:
    """What to do after a sweep in which nothing came back, and nothing could be told."""
    if any(case.measured and case.measured.out_of_time for case in report.cases):
        return _longer(line)
    words = "No answer yet: several rounds of the same data may give it"
    if line is None:
        return Step(f"{words}. Add rounds (1, 4, 10).")
    return Step(f"{words}:", str(line.given("--rounds", "1,4,10")))


def _price(case: Case) -> float:
    """What a setting costs in accuracy; one without a defence costs nothing."""
    return (case.measured and case.measured.cost) or 0.0


def _spelled(command: str, options: Mapping[str, Any]) -> str:
    """A command line of ours, from options by the names of their arguments.

    >>> _spelled("audit", {"samples": (8,), "clip": (None, 1.0), "model": None})
    'spear audit --samples 8 --clip none,1'
    """
    words = ["spear", command]
    for name, value in options.items():
        if value is None:
            continue
        many = value if isinstance(value, tuple | list) else (value,)
        texts = (
            "none" if v is None else f"{v:g}" if isinstance(v, float) else str(v) for v in many
        )
        words += [f"--{name.replace('_', '-')}", ",".join(texts)]
    return shlex.join(words)
