"""NVFlare: what the results of a real job's clients give away, seen from the client or the server.

One line in a job that is made with its Job API or a recipe:

    from spear.integrations.nvflare import AuditFilter
    recipe.add_client_output_filter(AuditFilter(model=Net(), lr=0.01), tasks=["train"])
"""

from spear.errors import MissingExtra

try:
    from nvflare.apis.dxo_filter import DXOFilter  # noqa: F401
except ImportError as error:
    raise MissingExtra("NVFlare", "nvflare") from error

from spear.integrations.nvflare.audit_filter import AuditFilter

__all__ = ["AuditFilter"]
