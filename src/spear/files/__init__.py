"""Files of others in, without running anything in them; files of ours out, private and whole."""

from spear.files.json_text import (
    LARGEST_ROWS,
    bytes_of,
    is_count,
    is_number,
    kind,
    mapping,
    maybe,
    parsed,
)
from spear.files.limits import checked_size
from spear.files.naming import like, matched, named, not_gradients
from spear.files.pickle_machine import Name, PickleMachine, Refused, text
from spear.files.private import (
    check_replaceable,
    make_private,
    remove_unfinished,
    replace_private,
    write_all_private,
    write_private,
)
from spear.files.provenance import commit, versions
from spear.files.tensors import positional, read_tensors
from spear.files.torch_files import read_torch
from spear.files.update_files import UpdateFiles, loss_of, observe_files
from spear.files.user_code import accepts, build_model, load_object

__all__ = [
    "LARGEST_ROWS",
    "Name",
    "PickleMachine",
    "Refused",
    "UpdateFiles",
    "accepts",
    "build_model",
    "bytes_of",
    "check_replaceable",
    "checked_size",
    "commit",
    "is_count",
    "is_number",
    "kind",
    "like",
    "load_object",
    "loss_of",
    "make_private",
    "mapping",
    "matched",
    "maybe",
    "named",
    "not_gradients",
    "observe_files",
    "parsed",
    "positional",
    "read_tensors",
    "read_torch",
    "remove_unfinished",
    "replace_private",
    "text",
    "versions",
    "write_all_private",
    "write_private",
]
