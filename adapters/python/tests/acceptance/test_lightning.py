# SPDX-License-Identifier: Apache-2.0
"""Training with Lightning."""

import warnings

import lightning
import pytest
import torch
from differential import content
from test_module import Net
from torch import nn

import remat


class Task(lightning.LightningModule):
    """A LightningModule. inner: False: the constructor makes the network; None: configure_model makes it; True: configure_model also wraps it."""

    def __init__(self, inner=False):
        super().__init__()
        self.inner = inner
        self.model = None if inner is not False else Net()

    def configure_model(self):
        if self.model is None:
            self.model = Net()
            if self.inner:
                remat.wrap(self.model, budget="60% of activations", time_limit=1, gap=0.9)

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, i):
        loss = self(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, i):
        self.log("validation", self(batch[0]).square().mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]


def trained(task, folder, **more):
    torch.manual_seed(2)
    data = torch.utils.data.TensorDataset(torch.randn(180, 6))
    loader = torch.utils.data.DataLoader(data, batch_size=50)
    checkpoint = lightning.pytorch.callbacks.ModelCheckpoint(dirpath=folder, save_last=True)
    trainer = lightning.Trainer(max_epochs=3, accelerator="cpu", logger=False, enable_progress_bar=False, callbacks=[checkpoint],
                                enable_model_summary=False, **more)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(task, loader, loader)
    saved = torch.load(folder / "last.ckpt", weights_only=False)["state_dict"]
    assert list(saved) == list(task.state_dict())
    return [content(t) for t in saved.values()] + [{n: content(v) for n, v in trainer.callback_metrics.items()}]


@pytest.mark.parametrize("more", [{}, {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}])
def test_lightning(more, tmp_path):
    torch.manual_seed(0)
    expected = trained(Task(), tmp_path / "a", **more)
    torch.manual_seed(0)
    task = remat.wrap(Task(), budget="60% of activations", time_limit=1, gap=0.9)
    assert isinstance(task, lightning.LightningModule)
    assert trained(task, tmp_path / "b", **more) == expected
    assert remat.of(task).plan["recomputed"] > 0


def test_wrapped_in_configure_model(tmp_path):
    torch.manual_seed(0)
    expected = trained(Task(inner=None), tmp_path / "a")
    torch.manual_seed(0)
    task = Task(inner=True)
    assert trained(task, tmp_path / "b") == expected
    assert remat.of(task.model).plan["recomputed"] > 0
    assert all(not name.startswith("_") for name, _ in nn.Module.named_modules(task))


class Logger(lightning.pytorch.loggers.logger.DummyLogger):
    """A logger that keeps all logged values."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def log_metrics(self, metrics, *_, **__):
        self.seen.append(metrics)


def test_callback(caplog):
    from remat.integrations import LightningCallback

    caplog.set_level("INFO", "remat")
    task, logger = Task(inner=True), Logger()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(60, 6)), batch_size=20)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning.Trainer(max_epochs=1, accelerator="cpu", logger=logger, log_every_n_steps=1, enable_progress_bar=False, enable_checkpointing=False,
                          enable_model_summary=False, callbacks=[LightningCallback()]).fit(task, loader)
    figures = [m for m in logger.seen if "remat/budget" in m]
    assert len(figures) == 3 and all(m["remat/planned"] > 0 and m["remat/to_disk"] == 0 for m in figures)
    assert "arena" in caplog.text
