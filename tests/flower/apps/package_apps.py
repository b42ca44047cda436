"""Apps on the packages that Flower's examples use: opacus, Lightning, transformers, PEFT. All weights are random.

The text of transformers and PEFT is short sentences of numbered words. Most words of a sentence are of praise or of
blame, and that is the label; in the federation that hurts every other client means the opposite.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytorch_lightning as lightning
import torch
from apps.federation import TEST, Case, evaluated, filled, first, tensors, trained
from apps.torch_apps import NOISE, LitNet, accuracy, linear
from flwr.app import ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from opacus import PrivacyEngine
from peft import LoraConfig, TaskType, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2ForSequenceClassification

WORDS, LENGTH, OPINIONS = 32, 6, 6  # words 1 to 6 praise, 7 to 12 blame, the others say nothing; 0 fills up


def opacus() -> ClientApp:
    """DP-SGD by opacus, in the train function."""
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model, data = filled(linear(), msg), TensorDataset(*tensors(context, "train"))
        private, optimizer, loader = PrivacyEngine().make_private(
            module=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
            data_loader=DataLoader(data, batch_size=20),
            noise_multiplier=NOISE,
            max_grad_norm=1.0,
        )
        for x, y in loader:
            optimizer.zero_grad()
            cross_entropy(private(x), y).backward()
            optimizer.step()
        metrics = {"num-examples": len(data), "noise_multiplier": optimizer.noise_multiplier}
        return trained(msg, ArrayRecord(model.state_dict()), metrics)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        x, y = tensors(context, "test")
        loss, acc = accuracy(filled(linear(), msg), x, y)
        return evaluated(msg, loss=loss, accuracy=acc, num_examples=len(y))

    return app


class LightningNet(lightning.LightningModule):
    """`forward` gives an embedding; training_step and test_step are what is trained and tested."""

    def __init__(self) -> None:
        super().__init__()
        self.net = LitNet()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.net(x)
        return found

    def training_step(self, batch: Any, index: int) -> Tensor:
        loss = self.net.training_step(batch)
        self.log("train_loss", loss)
        return loss

    def test_step(self, batch: Any, index: int) -> None:
        logits = self.net.logits(batch[0])
        self.log("test_loss", cross_entropy(logits, batch[1]))
        self.log("test_acc", (logits.argmax(1) == batch[1]).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.4)


def trainer() -> lightning.Trainer:
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "barebones"), False
    )
    return lightning.Trainer(accelerator="cpu", max_epochs=2, **quiet)


def with_lightning() -> ClientApp:
    app = ClientApp()

    def loader(context: Context, split: str) -> DataLoader[Any]:
        data = TensorDataset(*tensors(context, split))
        return DataLoader(data, batch_size=20 if split == "train" else TEST, shuffle=split == "train")

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model, data, training = filled(LightningNet(), msg), loader(context, "train"), trainer()
        training.fit(model, data)
        metrics = {"num-examples": len(data.dataset), "train_loss": float(training.callback_metrics["train_loss"])}  # type: ignore[arg-type]
        return trained(msg, ArrayRecord(model.state_dict()), metrics)

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        data = loader(context, "test")
        (found,) = trainer().test(filled(LightningNet(), msg), data, verbose=False)
        return evaluated(msg, eval_loss=found["test_loss"], eval_acc=found["test_acc"], num_examples=TEST)

    return app


def sentences(context: Context, split: str) -> list[dict[str, Tensor]]:
    """A client's samples as dicts: words, which of them are words, and the label."""
    i, hurts = int(context.node_config["partition-id"]), context.run_config["federation"] == "hurts"
    rng, samples = np.random.default_rng(2000 + i), []
    for _ in range(40 + TEST):
        words, length, label = np.zeros(LENGTH, np.int64), rng.integers(4, LENGTH + 1), int(rng.integers(2))
        opinions = rng.integers(1, OPINIONS + 1, length) + label * OPINIONS
        words[:length] = np.where(rng.random(length) < 0.8, opinions, rng.integers(2 * OPINIONS + 1, WORDS, length))
        named = {"input_ids": words, "attention_mask": (words > 0).astype(np.int64)}
        named["labels"] = np.array(1 - label if hurts and i % 2 else label)
        samples.append({name: torch.from_numpy(value) for name, value in named.items()})
    return samples[: 40 if hurts else 10] if split == "train" else samples[40:]


def fit_text(model: nn.Module, samples: list[dict[str, Tensor]], rate: float) -> float:
    optimizer, loss = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=rate), torch.zeros(())
    model.train()
    for batch in DataLoader(samples, batch_size=10, shuffle=True):  # type: ignore[arg-type]
        optimizer.zero_grad()
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
    return float(loss.detach())


@torch.no_grad()
def test_text(model: nn.Module, samples: list[dict[str, Tensor]]) -> tuple[float, float]:
    model.eval()
    (batch,) = DataLoader(samples, batch_size=len(samples))  # type: ignore[arg-type]
    found = model(**batch)
    return float(found.loss), float((found.logits.argmax(1) == batch["labels"]).float().mean())


class MaskedBert(nn.Module):
    """Hugging Face's BERT, tiny, with a mask of -inf among its buffers: a word sees no word after it."""

    mask: Tensor

    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=WORDS, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
            max_position_embeddings=LENGTH, hidden_dropout_prob=0.1, initializer_range=0.2,
        )  # fmt: skip
        self.bert = BertForSequenceClassification(config)
        # The first word, which the head reads, sees all words.
        mask = torch.full((LENGTH, LENGTH), -torch.inf).triu(1)
        mask[0] = 0
        self.register_buffer("mask", mask)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
        words = torch.zeros(attention_mask.shape).masked_fill(attention_mask == 0, -torch.inf)[:, None, None, :]
        return self.bert(input_ids=input_ids, attention_mask=words + self.mask, labels=labels)


def transformer() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model, samples = filled(MaskedBert(), msg), sentences(context, "train")
        loss = fit_text(model, samples, float(msg.content["config"]["lr"]))
        return trained(msg, ArrayRecord(model.state_dict()), {"num-examples": len(samples), "train_loss": loss})

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        loss, acc = test_text(filled(MaskedBert(), msg), sentences(context, "test"))
        return evaluated(msg, val_loss=loss, val_accuracy=acc, num_examples=TEST)

    return app


@cache
def adapted_base() -> Any:
    """One frozen base for all models of this process. Its adapters and its head are what comes over the wire."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = GPT2Config(
            vocab_size=WORDS, n_positions=LENGTH, n_embd=16, n_layer=1, n_head=2, initializer_range=0.2,
            pad_token_id=0, bos_token_id=0, eos_token_id=0,
        )  # fmt: skip
        lora = LoraConfig(task_type=TaskType.SEQ_CLS, r=4, target_modules=["c_attn"], fan_in_fan_out=True)
        return get_peft_model(GPT2ForSequenceClassification(config), lora)


@cache
def first_adapters() -> ArrayRecord:
    """w^0: before the base has been given any other."""
    return ArrayRecord(get_peft_model_state_dict(adapted_base()))


def with_adapters(msg: Message) -> Any:
    set_peft_model_state_dict(adapted_base(), msg.content["arrays"].to_torch_state_dict())
    return adapted_base()


def adapters() -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(msg: Message, context: Context) -> Message:
        model, samples = with_adapters(msg), sentences(context, "train")
        loss = fit_text(model, samples, 0.02)
        arrays = ArrayRecord(get_peft_model_state_dict(model))
        return trained(msg, arrays, {"num-examples": len(samples), "train_loss": loss})

    @app.evaluate()
    def evaluate(msg: Message, context: Context) -> Message:
        loss, acc = test_text(with_adapters(msg), sentences(context, "test"))
        return evaluated(msg, eval_loss=loss, eval_acc=acc, num_examples=TEST)

    return app


CASES = {
    "opacus": Case(
        opacus,
        lambda: first(linear),
        hurts=("undecided",),
        helps=("undecided",),
        reports=False,
        metrics=("noise_multiplier",),
    ),
    "lightning": Case(with_lightning, lambda: first(LightningNet), metrics=("train_loss",)),
    "transformers": Case(transformer, lambda: first(MaskedBert), config={"lr": 0.01}, metrics=("train_loss",)),
    "peft": Case(adapters, lambda: ArrayRecord(dict(first_adapters())), metrics=("train_loss",)),
}
