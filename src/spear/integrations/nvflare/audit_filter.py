"""AuditFilter: a DXOFilter that shows what a task result gives away, and changes nothing in it."""

from __future__ import annotations

import copy
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.dxo_filter import DXOFilter
from nvflare.apis.event_type import EventType
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FLContextKey, ProcessType, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from nvflare.apis.utils.task_utils import contains_lazy_download_ref
from nvflare.app_common.app_constant import AppConstants
from torch import Tensor, nn

from spear.errors import InvalidOption, InvalidUpdate
from spear.files import load_object
from spear.integrations import remarks
from spear.integrations.examiner import (
    Examined,
    Examiner,
    Framework,
    Model,
    Options,
    Private,
    Update,
    Whose,
)
from spear.integrations.messages import Arrays
from spear.integrations.running_report import Entry, write_reply
from spear.integrations.several_rounds import SeveralRounds
from spear.report import ImageFormat, Level, Remark

NVFLARE = Framework(
    "nvflare",
    "nvflare",
    logging.getLogger("spear.nvflare"),
    "NVFlare's messages do not say how many local epochs a client takes: epochs=",
)
_SENDS: dict[str, Literal["weights", "difference"]] = {
    DataKind.WEIGHTS: "weights",
    DataKind.WEIGHT_DIFF: "difference",
}
_LEAVES = Remark(
    Level.NOTE,
    "What was seen",
    "The task result on the client itself, after the site's own filters and those of the job that are "
    "listed before this one. Only the last of the list sees what really leaves: listed before a filter "
    "that adds noise, prunes, quantises or encrypts, it sees the update before that has changed it. A "
    "result from which nothing was recovered is not proved safe.",
)
_ARRIVES = Remark(
    Level.NOTE,
    "What was seen",
    "The task result as it arrived, after everything that filters on the client did to it, and before "
    "the server's filters that are listed after this one. The verdict is about this attack; a result "
    "from which nothing was recovered is not proved safe.",
)


@dataclass(frozen=True, eq=False)
class _Task:
    """What a client was sent: a copy, since training in the same process may work in place."""

    server_round: int
    arrays: Arrays  # none where NVFlare hands them to an external process
    told: Mapping[str, Any]


class AuditFilter(DXOFilter):  # type: ignore[misc]
    """A filter of task results that audits each of them and hands it on as it is.

    On a client it sees what leaves (`recipe.add_client_output_filter`, put it last), on the server what
    arrives from each client (`recipe.add_server_input_filter`, put it first).

    Args:
        model: the clients' model: a module, `{"path": "net.Net", "args": {...}}` in a job's config, or
            the id of a component that is one or has one as `.model`. A plain MLP needs none.
        folder: where reports go, a JSON and HTML for each client and round: in the job's workspace,
            unless absolute; None only logs.
        redact: leave what was recovered out of the reports.
        history: how many rounds of each client are kept, and audited together; 1 keeps nothing.
        history_megabytes: how much memory that may take, for all clients together.
        image_format: how to show inputs; guessed for usual sizes unless given.
        truth: what a client holds, to compare with, if you may know it: a function, or its name
            "package.module:function", which a job's config can hold. It is called with the client's
            name, and returns inputs (b, ...), or (inputs, labels), or (inputs, labels, names), or None.
        options: what is known of the clients, and limits: see `Options` of the Flower audit. Each may
            also be given by its own name. `sends` follows the kind of the DXO unless given.
    """

    def __init__(
        self,
        model: Model | str | None = None,
        *,
        folder: str | None = "spear-audit",
        redact: bool = False,
        history: int = 20,
        history_megabytes: float = 1024.0,
        image_format: ImageFormat | None = None,
        truth: str | Callable[[str], Any] | None = None,
        options: Options | None = None,
        **more: Any,
    ) -> None:
        super().__init__(supported_data_kinds=None, data_kinds_to_filter=None)
        # NVFlare writes a job's config from attributes that are named as the arguments are.
        self.model, self.folder, self.redact = model, folder, redact
        self.history, self.history_megabytes = history, history_megabytes
        self.image_format, self.truth = image_format, truth
        self.options: dict[str, Any] = {**(options or {}), **more}
        self._new_examiner(None if isinstance(model, str) else model)  # report mistakes at once
        self._examiner: Examiner | None = None
        self._tasks: dict[str, _Task] = {}  # by client

    def add_to_fed_job(self, job: Any, ctx: Any, **kwargs: Any) -> None:
        """Called by the Job API, which copies sources of its own accord: SPEAR is installed instead."""
        job.set_app_packages([*job.job.app_packages, "spear"])
        kwargs["tasks"] = kwargs.get("tasks") or [AppConstants.TASK_TRAIN]
        super().add_to_fed_job(job, ctx, **kwargs)

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Keep what a client is sent, until its result is there; forget everything at the end."""
        if event_type == EventType.END_RUN:
            self._tasks.clear()
            if self._examiner is not None and self._examiner.several is not None:
                self._examiner.several.clear()
        elif event_type == EventType.AFTER_TASK_DATA_FILTER and not self._hears_tasks:
            try:
                self._keep(fl_ctx)
            except Exception:  # an audit never gets in a job's way
                NVFLARE.log.warning("SPEAR: this task could not be read", exc_info=True)

    @property
    def _hears_tasks(self) -> bool:
        """Is this a filter of tasks? There it only makes NVFlare load what it hands on."""
        return bool(self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN)

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        """As `DXOFilter` has it, but what it would pass in silence is told. Tasks are never audited."""
        if self._hears_tasks or shareable.get_return_code() != ReturnCode.OK:
            return shareable
        try:
            kind = from_shareable(shareable).data_kind
        except ValueError as error:
            NVFLARE.log.warning("SPEAR: a result was not audited: %s", error)
            return shareable
        if kind == DataKind.COLLECTION:
            NVFLARE.log.warning("SPEAR: a result was not audited: it is a collection of DXOs")
            return shareable
        return super().process(shareable, fl_ctx)

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> None:
        """Audit one update; None, so it is handed on as it is."""
        if dxo.data_kind not in _SENDS:
            NVFLARE.log.info("SPEAR: a result was not audited: %s is no update", dxo.data_kind)
            return
        try:
            entry = self._audited(dxo, fl_ctx, shareable.get_header(AppConstants.CURRENT_ROUND, 0))
        except Exception:  # as above
            NVFLARE.log.warning("SPEAR: this result could not be audited", exc_info=True)
            return
        together = entry.examined.together
        if entry.examined.interrupted or (together and together.examined.interrupted):
            raise KeyboardInterrupt

    def _keep(self, fl_ctx: FLContext) -> None:
        client = _client(fl_ctx)
        last = self._tasks.pop(client, None)
        task = fl_ctx.get_prop(FLContextKey.TASK_DATA)
        if not isinstance(task, Shareable):
            return
        if task.get_header(ReservedHeaderKey.CONTENT_TYPE) != "DXO":
            return
        dxo = from_shareable(task)
        if dxo.data_kind != DataKind.WEIGHTS or _processed(dxo):
            return
        here = not contains_lazy_download_ref(dxo.data)
        known = [one.arrays for one in list(self._tasks.values()) if _same(one.arrays, dxo.data)]
        arrays: Arrays = {}
        if here:  # one copy for all clients of a round
            arrays = known[0] if known else copy.deepcopy(_arrays(dxo.data))
        number = 0 if last is None else last.server_round + 1  # unless the task says
        server_round = task.get_header(AppConstants.CURRENT_ROUND, number)
        self._tasks[client] = _Task(server_round, arrays, dict(dxo.meta))

    def _audited(self, dxo: DXO, fl_ctx: FLContext, number: int) -> Entry:
        began = time.monotonic()
        client = _client(fl_ctx)
        task = self._tasks.get(client)
        number = number if task is None else task.server_round
        self._examiner = examiner = self._examiner or self._new_examiner(self._found(fl_ctx))
        entry = Entry(number, client, self._examined(examiner, task, dxo, client, number))
        entry.tell(NVFLARE.log)
        if self.folder is not None:
            workspace = fl_ctx.get_workspace().get_result_root(fl_ctx.get_job_id())
            seen = _ARRIVES if _on_server(fl_ctx) else _LEAVES
            kept = [remarks.kept(self.history, self.history_megabytes)]
            kept += remarks.of_history(examiner.several)
            folder, redact = Path(workspace, self.folder), self.redact
            write_reply(
                NVFLARE, entry, folder, self.options, seen, redact=redact, began=began, also=kept
            )
        return entry

    def _examined(
        self, examiner: Examiner, task: _Task | None, dxo: DXO, client: str, number: int
    ) -> Examined:
        """What one update gives away; what cannot be read becomes a finding that says why."""
        name = f"round {number}, client {client}"
        try:
            before, update = _read(examiner, task, dxo, "sends" in self.options)
        except Exception as error:
            return examiner.unaudited(name, error)
        private, failed = self._private(client)
        return examiner.examine(
            name,
            before,
            update.values,
            update.protocol,
            notes=[*update.notes, *failed],
            private=private,
            whose=Whose(client, f"client {client}", number),
        )

    def _private(self, client: str) -> tuple[Private | None, list[str]]:
        """What the client holds, if that may be known; or that it could not be had."""
        if self.truth is None:
            return None, []
        try:
            truth = load_object(self.truth) if isinstance(self.truth, str) else self.truth
            return Private.of(truth(client)), []
        except Exception as error:  # the user's function; the attack does not need it
            NVFLARE.log.warning("SPEAR: truth= failed", exc_info=True)
            return None, [f"truth= failed ({type(error).__name__}: {error})"]

    def _new_examiner(self, model: Model | None) -> Examiner:
        options = {**self.options, "image_format": self.image_format}
        beside = ("folder", "redact", "history", "history_megabytes", "truth", "options")
        examiner = Examiner.new(NVFLARE, model, options, beside)
        several = SeveralRounds(self.history, self.history_megabytes, examiner.max_seconds)
        examiner.several = several if self.history > 1 else None
        return examiner

    def _found(self, fl_ctx: FLContext) -> Model | None:
        """The model, which may be that of another component."""
        if not isinstance(self.model, str):
            return self.model
        component = fl_ctx.get_engine().get_component(self.model)
        model = component if isinstance(component, nn.Module) else getattr(component, "model", None)
        if not isinstance(model, nn.Module):
            raise InvalidOption(
                f"expected model= to be the id of a component that is a module or has one as .model; "
                f"{self.model!r} is {'unknown' if component is None else type(component).__name__}"
            )
        return model


def _read(examiner: Examiner, task: _Task | None, dxo: DXO, told: bool) -> tuple[Arrays, Update]:
    """The update beside what the client was sent; raises if it cannot be read."""
    if _processed(dxo):
        raise InvalidUpdate(
            [
                f"the result is encrypted or quantised ({_processed(dxo)}): to see what it holds, list "
                "this filter before the one that does it, or on the server after the one that undoes it"
            ]
        )
    if task is None:
        raise InvalidUpdate(
            [
                "it is not known which weights the client was sent: expected a task with a DXO of "
                "WEIGHTS, neither encrypted nor quantised, and this filter in the job's config, where "
                "it hears of tasks"
            ]
        )
    if not task.arrays:
        raise InvalidUpdate(
            [
                "NVFlare handed the weights that the client was sent to an external process: add this "
                "filter to the task's data as well (recipe.add_client_input_filter)"
            ]
        )
    examiner.match_model(task.arrays)
    places = (("the result's meta", dxo.meta), ("the task's meta", task.told))
    update = examiner.read(task.arrays, _arrays(dxo.data), places)
    if not told:
        protocol = dataclasses.replace(update.protocol, sends=_SENDS[dxo.data_kind])
        update = dataclasses.replace(update, protocol=protocol)
    return task.arrays, update


def _processed(dxo: DXO) -> str:
    """The algorithm that encrypted or quantised it, if any."""
    return str(dxo.get_meta_prop(MetaKey.PROCESSED_ALGORITHM) or "")


def _arrays(data: Mapping[str, Any]) -> Arrays:
    """The values of a DXO; plain numbers, such as a counter's, as arrays."""
    return {name: v if hasattr(v, "shape") else np.asarray(v) for name, v in data.items()}


def _same(one: Arrays, other: Arrays) -> bool:
    """Are these the same weights, bit for bit?"""
    if one.keys() != other.keys():
        return False
    pairs = [(one[name], other[name]) for name in one]
    return all(
        torch.equal(a, b) if isinstance(a, Tensor) else np.array_equal(a, b)
        for a, b in pairs
        if type(a) is type(b)
    ) and all(type(a) is type(b) for a, b in pairs)


def _on_server(fl_ctx: FLContext) -> bool:
    return fl_ctx.get_process_type() in (ProcessType.SERVER_JOB, ProcessType.SERVER_PARENT)


def _client(fl_ctx: FLContext) -> str:
    """Whose task or result it is."""
    whose = fl_ctx.get_peer_context() if _on_server(fl_ctx) else fl_ctx
    return str(whose.get_identity_name())
