"""A job whose server audits what arrives, by its persistor's model; the clients' audit cannot work."""

import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "nvflare_audit"
sys.path.insert(0, str(EXAMPLE))

import torch
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.client.config import TransferType
from nvflare.recipe import SimEnv
from task import Net

from spear.integrations.nvflare import AuditFilter

if __name__ == "__main__":  # a job is run, not imported
    torch.manual_seed(0)
    recipe = FedAvgRecipe(
        name="pictures",
        model=Net(),
        min_clients=2,
        num_rounds=1,
        train_script=str(EXAMPLE / "client.py"),
        params_transfer_type=TransferType.DIFF,
        key_metric="",
    )
    recipe.add_client_output_filter(AuditFilter("nobody", lr=0.01))
    recipe.add_server_input_filter(AuditFilter("persistor", lr=0.01, epochs=1))
    recipe.execute(SimEnv(num_clients=2, workspace_root=sys.argv[1]))
