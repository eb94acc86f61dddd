# SPDX-License-Identifier: Apache-2.0
"""Fine-tuning with transformers, accelerate and peft, as in their examples."""

import json
import logging
import pathlib

import emulated
import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import extract_model_from_parallel
from differential import assert_same, content, train
from peft import LoraConfig, get_peft_model
from transformers import (BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM,
                          Trainer, TrainerCallback, TrainingArguments)

import remat

ON_CUDA = emulated.device.type == "cuda"
known_device = pytest.mark.skipif(not emulated.on_host and not ON_CUDA, reason="these packages do not know the device")


def gpt2(**more):
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0,
                                      **more))


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                                        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32))


def wrapped(model, budget="80% of activations", **options):
    return remat.wrap(model, budget=budget, time_limit=1, gap=0.9, **options)


class Sentences(torch.utils.data.Dataset):
    """Token sequences of given lengths in host memory. Trainers move them to the device."""

    def __init__(self, lengths, seed=3, device="cpu"):
        g = torch.Generator().manual_seed(seed)
        rows = [torch.randint(0, 50, (n,), generator=g, device="cpu").to(device) for n in lengths]
        self.items = [{"input_ids": i, "labels": i} for i in rows]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


def padded(items):
    """Pads all sequences to the longest of the batch, as DataCollatorForSeq2Seq does."""
    longest = max(len(i["input_ids"]) for i in items)

    def put(name, fill):
        return torch.stack([torch.nn.functional.pad(i[name], (0, longest - len(i[name])), value=fill) for i in items])

    return {"input_ids": put("input_ids", 0), "labels": put("labels", -100),
            "attention_mask": torch.stack([(torch.arange(longest) < len(i["input_ids"])).long() for i in items])}


LENGTHS = [24, 18, 24, 14, 24, 24, 9, 16, 22, 24]


def sentences(lengths):
    return Sentences(lengths, device=emulated.device)


class HostTrainer(Trainer):
    """A Trainer whose loaders draw and keep tensors on the host, whatever the default device."""

    def train(self, *args, **kwargs):
        with torch.device("cpu"):
            return super().train(*args, **kwargs)


class Watch(TrainerCallback):
    """Keeps the log: losses and gradient norms."""

    def __init__(self):
        self.logged = []

    def on_log(self, args, state, control, logs=None, **_):
        self.logged.append({k: v for k, v in logs.items() if "runtime" not in k and "per_second" not in k})


def trainer(model, folder, evaluate=True, lengths=LENGTHS, **more):
    settings = {"per_device_train_batch_size": 4, "num_train_epochs": 2, "logging_steps": 1, "report_to": "none", "use_cpu": not ON_CUDA,
                "save_strategy": "no", "disable_tqdm": True, "eval_strategy": "epoch" if evaluate else "no"} | more
    watch = Watch()
    arguments = TrainingArguments(str(folder), **settings)
    arguments._n_gpu = min(arguments.n_gpu, 1)  # otherwise the trainer uses DataParallel
    t = HostTrainer(model, arguments, data_collator=padded, train_dataset=Sentences(lengths),
                eval_dataset=Sentences([20, 8, 24], 5) if evaluate else None, callbacks=[watch])
    t.watch = watch
    return t


def trained(model, folder, **more):
    t = trainer(model, folder, **more)
    t.train()
    return t.watch.logged, {n: content(p) for n, p in model.state_dict().items()}


@pytest.mark.parametrize("make", [gpt2, llama])
def test_trainer(make, tmp_path, caplog):
    """A Trainer run with a wrapped model gives equal logs and parameters, with few captures."""
    model = wrapped(make())
    expected = trained(make(), tmp_path / "a")
    with caplog.at_level(logging.INFO, "remat"):
        assert trained(model, tmp_path / "b") == expected
    assert any("eval_loss" in line for line in expected[0])
    with torch.device("cpu"):
        shapes = {(len(b["input_ids"]), b["input_ids"].shape[1]) for b in trainer(make(), tmp_path / "c").get_train_dataloader()}
    captures = sum("captured" in r.message for r in caplog.records)
    assert 0 < captures <= 2 * (len(shapes) + 3)
    assert any(plan["recomputed"] > 0 for plan in remat.of(model).plans)


def test_callback(tmp_path, caplog):
    from remat.integrations import TrainerCallback as Told

    caplog.set_level(logging.INFO, "remat")
    told = trainer(wrapped(gpt2()), tmp_path / "a", evaluate=False)
    told.add_callback(Told())
    told.train()
    figures = [line for line in told.state.log_history if "loss" in line]
    assert figures and all(line["remat/planned"] > 0 for line in figures)
    assert "arena" in caplog.text
    plain = trainer(gpt2(), tmp_path / "b", evaluate=False)  # a model that is not wrapped: the callback adds no figures
    plain.add_callback(Told())
    plain.train()
    assert [{k: v for k, v in line.items() if not k.startswith("remat/")}["loss"] for line in figures] == [line["loss"] for line in plain.state.log_history if "loss" in line]
    assert not any(key.startswith("remat/") for line in plain.state.log_history for key in line)


@pytest.mark.parametrize("make", [gpt2, llama, lambda: get_peft_model(gpt2(), LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True))])
def test_models_are_read_once(make, monkeypatch):
    """A step of an unchanged model does not read the whole model again."""
    model = wrapped(make(), "200% of activations")
    batch = padded([sentences([9])[0]])
    for _ in range(2):
        model(**batch).loss.backward()
    monkeypatch.setattr(remat._session.Source, "signature", None)
    for _ in range(2):
        model(**batch).loss.backward()


def test_saving_and_resuming(tmp_path):
    """Saved states of a wrapped model are those of a plain model, and training resumes from them."""
    expected = trained(gpt2(), tmp_path / "a")
    model = wrapped(gpt2())
    assert trained(model, tmp_path / "b", save_strategy="steps", save_steps=4) == expected
    folder = tmp_path / "b" / "checkpoint-4"
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert (folder / "generation_config.json").exists() and (folder / "model.safetensors").exists()
    again = wrapped(gpt2())
    t = trainer(again, tmp_path / "c")
    t.train(resume_from_checkpoint=str(folder))
    assert {n: content(p) for n, p in again.state_dict().items()} == expected[1]
    t.save_model(str(tmp_path / "d"))
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "d")
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    assert {n: content(p) for n, p in loaded.state_dict().items()} == expected[1]
    model.save_pretrained(tmp_path / "e")
    assert [p.name for p in sorted((tmp_path / "e").iterdir())] == ["config.json", "generation_config.json", "model.safetensors"]


def test_bf16(tmp_path):
    """Training with bf16=True equals plain training with bf16=True."""
    expected = trained(llama(), tmp_path / "a", bf16=True)
    model = wrapped(llama())
    assert trained(model, tmp_path / "b", bf16=True) == expected
    assert any(plan["recomputed"] > 0 for plan in remat.of(model).plans)
    assert expected != trained(llama(), tmp_path / "c")


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant, tmp_path):
    """Models with gradient checkpointing of their own."""
    more = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}, "evaluate": False,
            "num_train_epochs": 1, "lengths": [24] * 12}
    expected = trained(llama(), tmp_path / "a", **more)
    assert trained(wrapped(llama()), tmp_path / "b", **more) == expected


def test_accumulation(tmp_path):
    """Gradient accumulation with clipping."""
    more = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "max_grad_norm": 0.1}
    assert trained(wrapped(gpt2()), tmp_path / "b", **more) == trained(gpt2(), tmp_path / "a", **more)


def test_generate_in_training():
    """`generate` between training steps."""

    def run(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        torch.manual_seed(3)
        seen = []
        for item in sentences([24] * 3):
            ids = item["input_ids"][None].repeat(4, 1)
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            for sample in (False, True):
                seen.append(content(model.generate(ids[:, :4], max_new_tokens=4, do_sample=sample, pad_token_id=0)))
            seen += [content(p) for p in model.parameters()] + [emulated.random_state().numpy().tobytes()]
        return seen

    assert run(wrapped(llama())) == run(llama())


def lora(model):
    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"]))


def on_base(model):
    wrapped(model)
    return lora(model)


def base_of_adapted(model):
    adapted = lora(model)
    wrapped(adapted.get_base_model())
    return adapted


@pytest.mark.parametrize("make", [lambda m: wrapped(lora(m)), on_base, base_of_adapted], ids=["after", "before", "base"])
def test_lora(make, tmp_path):
    """LoRA adapters that are added before or after wrapping, and a wrapped base model."""
    expected = trained(lora(llama()), tmp_path / "a", evaluate=False)
    model = make(llama())
    assert trained(model, tmp_path / "b", evaluate=False) == expected
    assert all((p.grad is None) or "lora" in n for n, p in model.named_parameters())
    model.save_pretrained(tmp_path / "c")
    assert {p.name for p in (tmp_path / "c").iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    merged, plain = model.merge_and_unload(), lora(llama())
    plain.load_state_dict({n: p for n, p in model.state_dict().items()}, strict=False)
    assert type(merged) is LlamaForCausalLM


def test_merged_adapter_trains_on():
    """A model whose LoRA adapter has been merged trains on."""

    def run(planned):
        model = lora(llama())
        if planned:
            wrapped(model)
        seen = []

        def steps():
            torch.manual_seed(2)
            for item in sentences([24, 24]):
                model.zero_grad()
                ids = item["input_ids"][None].repeat(4, 1)
                loss = model(input_ids=ids, labels=ids).loss
                loss.backward()
                seen.append(content(loss))
                seen.extend(content(p.grad) for p in model.parameters())

        steps()
        model.merge_adapter()
        assert not model(input_ids=torch.ones(2, 4, dtype=torch.long)).logits.requires_grad
        for p in model.parameters():
            p.requires_grad_(p.dim() == 1)
        steps()
        model.unmerge_adapter()
        steps()
        return seen

    assert run(True) == run(False)


@known_device
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision):
    """Accelerator: prepare, accumulate, clip, and unwrap_model."""

    def run(planned):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(cpu=not ON_CUDA, mixed_precision=precision, gradient_accumulation_steps=2)
        model = gpt2()
        if planned:
            wrapped(model)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (i + 1))
        data = torch.utils.data.DataLoader(Sentences([24] * 8), batch_size=4)
        prepared, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
        torch.manual_seed(3)
        seen = []
        for batch in data:
            with accelerator.accumulate(prepared):
                loss = prepared(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(prepared.parameters(), 0.5)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                seen.append(content(loss))
        seen += [content(p) for p in prepared.parameters()]
        if planned:
            count = remat.of(model).plan["operations"]
            assert count > 0
        for flags in ({}, {"keep_fp32_wrapper": False}, {"keep_torch_compile": False}, {"keep_fp32_wrapper": True}):
            raw = accelerator.unwrap_model(prepared, **flags)
            assert raw is model and type(raw) is GPT2LMHeadModel
            if planned:
                assert remat.is_wrapped(raw)
        assert extract_model_from_parallel(prepared, recursive=True) is model
        ids = sentences([24])[0]["input_ids"][None].repeat(4, 1)
        model.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        if planned:
            assert remat.of(model).plan["recomputed"] > 0
        return seen + [content(p.grad) for p in model.parameters()]

    assert run(True) == run(False)


def test_many_lengths():
    """An epoch with 50 lengths of sequences. Every step is planned within the budget."""
    g = emulated.generator(1)
    lengths = torch.randperm(50, generator=g) + 8

    def run(model):
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        torch.manual_seed(3)
        seen = []
        for n in lengths.tolist():
            ids = torch.randint(0, 50, (2, n))
            optimizer.zero_grad()
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            if remat.is_wrapped(model):
                m = remat.of(model).memory()
                assert m["planned"] <= m["budget"]
        return [content(p) for p in model.parameters()]

    def long_gpt2():
        torch.manual_seed(0)
        return GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=64))

    long = torch.randint(0, 50, (2, 58), generator=g)
    planned = long_gpt2()
    budget = smallest_for(long_gpt2, long) * 5 // 4  # 25 % slack, because the plans of a search of one second vary, also between lengths
    remat.wrap(planned, (), {"input_ids": long, "labels": long}, budget=budget, time_limit=1, gap=0.9)
    assert run(planned) == run(long_gpt2())
    assert sum(plan["recomputed"] > 0 for plan in remat.of(planned).plans) > 5, [p["recomputed"] for p in remat.of(planned).plans]


def smallest_for(make, ids):
    """The smallest known budget for these inputs, in bytes. A step within it must recompute."""
    with pytest.raises(remat.OverBudget) as over:
        wrapped(make(), 1)(input_ids=ids, labels=ids)
    return over.value.needed


@known_device
def test_auto_find_batch_size(tmp_path):
    """With auto_find_batch_size, the Trainer reduces a batch that does not fit the budget."""
    longest = torch.zeros(2, 24, dtype=torch.long)
    budget = smallest_for(gpt2, longest) + 2000
    model = wrapped(gpt2(), budget)
    t = trainer(model, tmp_path, evaluate=False, auto_find_batch_size=True, per_device_train_batch_size=4, lengths=[24] * 16,
                num_train_epochs=1, max_steps=2)
    t.train()
    assert 1 <= t._train_batch_size < 4
    assert remat.of(model).memory()["planned"] <= budget


def test_classifier_with_frozen_embeddings():
    """A classifier with frozen embeddings is planned without enable_input_require_grads."""

    def made():
        torch.manual_seed(0)
        model = BertForSequenceClassification(BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
                                                         intermediate_size=32, max_position_embeddings=16))
        model.bert.embeddings.requires_grad_(False)
        model.bert.encoder.layer[0].requires_grad_(False)
        return model.train()

    batches = [{"input_ids": i["input_ids"][None].repeat(4, 1), "labels": torch.tensor([0, 1, 1, 0])} for i in sentences([16] * 3)]
    model = wrapped(made())
    assert_same(train(made(), batches), train(model, batches))
    assert remat.of(model).plan["recomputed"] > 0
