# SPDX-License-Identifier: Apache-2.0
"""A Lightning module, inside a budget."""
import lightning
import torch

import remat


class Learner(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
        self.model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        remat.wrap(self.model, budget="70% of activations", planner=remat.Planner(time_limit=5))  # the one line

    def training_step(self, batch, index):
        return (self.model(batch) - batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


device = [d["device"] for d in remat.devices() if not d["problem"]][:2][-1]  # the first GPU that steps can run on, or "cpu"
learner = Learner()
data = torch.utils.data.DataLoader(torch.randn(64, 64, 64), batch_size=16)
trainer = lightning.Trainer(max_epochs=1, accelerator="cpu" if device == "cpu" else "gpu", devices=1, logger=False,
                            enable_checkpointing=False, enable_progress_bar=False)
trainer.fit(learner, data)
print(remat.of(learner.model).report())
