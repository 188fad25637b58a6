"""A site of an NVFlare job in one process: real contexts, events, DXOs and filter chains."""

import copy

from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ProcessType
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.utils.task_utils import apply_filters
from nvflare.apis.workspace import Workspace
from nvflare.private.event import fire_event
from nvflare.private.privacy_manager import Scope

JOB = "a-job"


class Site:
    """The server, or a client, with filters of the results of its task `train`."""

    def __init__(self, folder, *filters, server=False, **components):
        for name in ("startup", "local"):
            (folder / name).mkdir(exist_ok=True)
        self.workspace, self.components = Workspace(str(folder)), components
        self.filters, self.server = list(filters), server
        kind = ProcessType.SERVER_JOB if server else ProcessType.CLIENT_JOB
        self.contexts = FLContextManager(
            self, "server" if server else "site-1", JOB, {}, {FLContextKey.PROCESS_TYPE: kind}
        )

    def get_workspace(self):
        return self.workspace

    def get_component(self, name):
        return self.components.get(name)

    def context(self, client="site-1"):
        peer = FLContext()
        peer.set_prop("__identity_name__", client if self.server else "server", private=False)
        context = self.contexts.new_context()
        context.set_peer_context(peer)
        return context

    def fire(self, event, context=None):
        fire_event(event, self.filters, context or self.context())

    def send(self, weights, client="site-1", number=0, **meta):
        """A task goes out to a client, or comes to it."""
        task = DXO(DataKind.WEIGHTS, data=weights, meta=meta).to_shareable()
        task.set_header("current_round", number)
        context = self.context(client)
        context.set_prop(FLContextKey.TASK_DATA, task, private=True, sticky=False)
        self.fire(EventType.AFTER_TASK_DATA_FILTER, context)

    def hand_in(self, result, client="site-1"):
        """A result passes through the filters."""
        direction = FilterKey.IN if self.server else FilterKey.OUT
        chains = {"train" + FilterKey.DELIMITER + direction: self.filters}
        name = Scope.TASK_RESULT_FILTERS_NAME
        return apply_filters(name, result, self.context(client), chains, "train", direction)

    def answer(self, weights, result, **told):
        """A task and its result; it must be what is handed on, to the bit."""
        self.send(copy.deepcopy(weights), **told)
        return self.hand_in(result, told.get("client", "site-1"))


def numpy(tensors):
    return {name: value.numpy().copy() for name, value in tensors.items()}
