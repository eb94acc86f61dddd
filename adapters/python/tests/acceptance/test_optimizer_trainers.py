# SPDX-License-Identifier: Apache-2.0
"""Optimizers with states on a disk in trainers of other packages."""

import os

import lightning
import pytest
import torch
from accelerate import Accelerator
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import remat
from compare import same
from optimizing import batch, net, weights


def train(optimizer, folder, resume=None, steps=8, **arguments):
    torch.manual_seed(5)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=128, n_positions=16, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0))
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 128, (32, 16), generator=torch.Generator().manual_seed(1))]
    told = TrainingArguments(folder, per_device_train_batch_size=4, max_steps=steps, report_to="none", use_cpu=True, save_steps=4,
                             logging_steps=1, disable_tqdm=True, lr_scheduler_type="cosine", weight_decay=0.1, **arguments)
    trainer = Trainer(model, told, train_dataset=rows, optimizer_cls_and_kwargs=(optimizer, {"lr": 1e-2}))
    trainer.train(resume_from_checkpoint=resume)
    return [e["loss"] for e in trainer.state.log_history if "loss" in e], weights(model), trainer


class Fused(torch.optim.AdamW):
    def __init__(self, params, **options):
        super().__init__(params, fused=True, **options)


def test_trainer_with_clipping_and_resuming(tmp_path):
    losses, expected, _ = train(Fused, tmp_path / "plain")
    ours = remat.offloaded(torch.optim.AdamW, disk=tmp_path)
    found, left, trainer = train(ours, tmp_path / "ours")
    assert found == losses and same(left, expected)
    assert isinstance(trainer.optimizer.optimizer, ours) and trainer.optimizer.optimizer.memory()["disk"] > 0
    sizes = [os.path.getsize(tmp_path / kind / "checkpoint-8" / "optimizer.pt") for kind in ("plain", "ours")]
    assert abs(sizes[0] - sizes[1]) < 64
    again = train(ours, tmp_path / "ours", resume=str(tmp_path / "ours/checkpoint-4"))
    assert again[0] == losses and same(again[1], expected)


def test_trainer_reads_the_norm_of_all_gradients(tmp_path):
    ours = remat.offloaded(torch.optim.AdamW, disk=tmp_path, step="overlap")
    for options in ({}, {"max_grad_norm": 0}, {"max_grad_norm": 0, "gradient_accumulation_steps": 2}):
        with pytest.raises(remat.Refused, match="overlap"):
            train(ours, tmp_path / "ours", save_strategy="no", **options)


@pytest.mark.parametrize("started", [False, True])
def test_accelerate_takes_states_out_and_puts_them_back(tmp_path, started):
    def run(make):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        model = net()
        optimizer = make(model.parameters())
        if started:
            model(batch(77)).square().mean().backward()
            optimizer.step()
        data = torch.utils.data.DataLoader(torch.cat([batch(i) for i in range(8)]), batch_size=8)
        model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9))
        for x in data:
            with accelerator.accumulate(model):
                accelerator.backward(model(x).square().mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return weights(model), optimizer.optimizer

    ours, optimizer = run(lambda p: remat.optimizer(p, disk=tmp_path, lr=1e-2))
    assert same(ours, run(lambda p: torch.optim.AdamW(p, 1e-2, fused=True))[0])
    assert optimizer.memory()["memory"] < 4096 * 4 < optimizer.memory()["disk"]


def test_lightning(tmp_path):
    def run(make):
        class Learner(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.model = net()

            def training_step(self, x, index):
                return self.model(x).square().mean()

            def configure_optimizers(self):
                return make(self.parameters())

        learner = Learner()
        data = torch.utils.data.DataLoader(torch.cat([batch(i) for i in range(6)]), batch_size=8)
        trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
                                    gradient_clip_val=0.5, default_root_dir=tmp_path)
        trainer.fit(learner, data)
        return weights(learner)

    assert same(run(lambda p: remat.optimizer(p, disk=tmp_path, lr=1e-2)), run(lambda p: torch.optim.AdamW(p, 1e-2, fused=True)))
