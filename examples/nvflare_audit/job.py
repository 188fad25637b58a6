"""Runs the job in NVFlare's simulator on this machine; reports are in each client's job folder.

python examples/nvflare_audit/job.py [WORKSPACE]
"""

import os
import sys
from pathlib import Path

# Clients on one machine share its cores: with a thread for each core in every process, threads wait for
# each other, and attacks of a second run out of time.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv
from task import CLIENTS, MEAN, PIXELS, STD, Net

from spear.integrations.nvflare import AuditFilter
from spear.report import ImageFormat

HERE = Path(__file__).resolve().parent
LEARNING_RATE = 0.01


def main(workspace: str) -> None:
    """Federated averaging, audited on every client."""
    torch.manual_seed(0)
    recipe = FedAvgRecipe(
        name="pictures",
        model=Net(),
        min_clients=CLIENTS,
        num_rounds=2,
        train_script=str(HERE / "client.py"),
        train_args=f"--lr {LEARNING_RATE}",
        key_metric="",  # the clients report none
    )
    pictures = ImageFormat((3, PIXELS, PIXELS), mean=(MEAN,), std=(STD,))
    audit = AuditFilter(
        Net(), lr=LEARNING_RATE, epochs=1, image_format=pictures, truth="task:load_data"
    )  # in an example, what each client holds may be shown beside what comes back
    recipe.add_client_output_filter(audit, tasks=["train"])
    recipe.execute(SimEnv(num_clients=CLIENTS, workspace_root=workspace))
    for report in sorted(Path(workspace).rglob("spear-audit/*.html")):
        print(report)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else str(Path.cwd() / "nvflare-workspace"))
