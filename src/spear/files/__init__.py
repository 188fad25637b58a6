"""Reads untrusted files without running anything in them; writes private ones whole or not at all."""

from spear.files.json_text import (
    LARGEST_ROWS,
    bytes_of,
    is_number,
    kind,
    mapping,
    maybe,
    parsed,
)
from spear.files.naming import like, matched, named, not_gradients
from spear.files.pickles import check_pickle
from spear.files.private import (
    check_replaceable,
    make_private,
    remove_unfinished,
    replace_private,
    write_all_private,
    write_private,
)
from spear.files.provenance import commit, versions
from spear.files.round_files import observe_rounds, rounds_in, rounds_of
from spear.files.tensors import positional, read_tensors
from spear.files.update_files import UpdateFiles, loss_of, observe_files
from spear.files.user_code import UserCode, accepts, build_model, load_object

__all__ = [
    "LARGEST_ROWS",
    "UpdateFiles",
    "UserCode",
    "accepts",
    "build_model",
    "bytes_of",
    "check_pickle",
    "check_replaceable",
    "commit",
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
    "observe_rounds",
    "parsed",
    "positional",
    "read_tensors",
    "remove_unfinished",
    "replace_private",
    "rounds_in",
    "rounds_of",
    "versions",
    "write_all_private",
    "write_private",
]
