"""Training: the schedule, the order of the data, checkpoints and the loss curve.

Decides everything that makes one run: a fixed number of steps (never a wall-clock budget), seeds
for weights, data order and dropout, the learning rate and the router losses. A run may be stopped
at any step and resumed: every random choice depends on (seed, step) alone. It knows nothing of
GGUF. The result is an average of the last weights.
"""

from __future__ import annotations

import csv
import math
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from model import DemoModel, Dropout, Shape
from numpy.typing import NDArray
from tokenizer import TokenArray
from torch import Tensor


@dataclass(frozen=True)
class Phase:
    """`steps` steps of `windows` windows of `length` tokens."""

    steps: int
    windows: int
    length: int


@dataclass(frozen=True)
class Recipe:
    """Everything that decides a run, but for the data and the processor's rounding."""

    phases: tuple[Phase, ...] = (Phase(4_272, 16, 256), Phase(1_304, 8, 512))
    seed: int = 1
    learning_rate: float = 2e-3
    learning_rate_last_share: float = 0.04
    warmup_steps: int = 120
    weight_decay: float = 0.1
    gradient_norm_max: float = 1.0
    dropout: float = 0.1
    balance_weight: float = 0.06
    balance_weight_late: float = 0.006
    z_weight: float = 1e-3
    average_every_steps: int = 10
    average_keep: float = 0.967

    @property
    def steps(self) -> int:
        return sum(phase.steps for phase in self.phases)

    def batch_of(self, step: int) -> tuple[Phase, int]:
        """The phase of a step, and the tokens consumed before it."""
        tokens = 0
        for phase in self.phases:
            if step < phase.steps:
                return phase, tokens + step * phase.windows * phase.length
            step -= phase.steps
            tokens += phase.steps * phase.windows * phase.length
        raise ValueError("the step is past the schedule's end")

    def learning_rate_of(self, step: int) -> float:
        """Linear warm-up times a cosine from 1 down to `learning_rate_last_share`."""
        last = self.learning_rate_last_share
        cosine = last + (1 - last) * 0.5 * (1 + math.cos(math.pi * step / self.steps))
        return self.learning_rate * min(1.0, (step + 1) / self.warmup_steps) * cosine

    def balance_weight_of(self, step: int) -> float:
        """The load is even by half-way; a softer push then leaves the router more freedom."""
        return self.balance_weight if step < self.steps // 2 else self.balance_weight_late


class TokenStream:
    """The training documents end to end, in a new order each epoch; a pure function of position."""

    def __init__(self, tokens: TokenArray, seed: int) -> None:
        self.seed = seed
        self.starts = tokens.starts
        self.ends = np.append(tokens.starts[1:], len(tokens.ids) - 1)
        self.ids = tokens.ids.astype(np.int64)
        self.epoch_size = int(self.ends[-1])
        self.epochs: dict[int, NDArray[np.int64]] = {}

    def epoch(self, index: int) -> NDArray[np.int64]:
        if index not in self.epochs:
            order = np.random.default_rng([self.seed, index]).permutation(len(self.starts))
            documents = [self.ids[self.starts[d] : self.ends[d]] for d in order]
            self.epochs = {k: v for k, v in self.epochs.items() if k == index - 1}
            self.epochs[index] = np.concatenate(documents)
        return self.epochs[index]

    def batch(self, position: int, windows: int, length: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, both [windows, length], of the tokens from `position` on."""
        wanted = windows * length + 1
        pieces = []
        while wanted:
            index, offset = divmod(position, self.epoch_size)
            piece = self.epoch(index)[offset : offset + wanted]
            pieces.append(piece)
            position += len(piece)
            wanted -= len(piece)
        ids = torch.from_numpy(np.concatenate(pieces))
        return ids[:-1].view(windows, length), ids[1:].view(windows, length)


class WeightAverage:
    """An exponential moving average of the weights."""

    def __init__(self, model: DemoModel, keep: float) -> None:
        self.keep = keep
        self.weights = [p.detach().clone() for p in model.parameters()]

    @torch.no_grad()
    def update(self, model: DemoModel) -> None:
        torch._foreach_lerp_(self.weights, list(model.parameters()), 1 - self.keep)

    @torch.no_grad()
    def swap(self, model: DemoModel) -> None:
        """Exchanges the average and the model's weights."""
        for average, parameter in zip(self.weights, model.parameters(), strict=True):
            held = parameter.detach().clone()
            parameter.copy_(average)
            average.copy_(held)


@dataclass(frozen=True)
class Evaluation:
    """Mean held-out loss in nats, and the least and greatest expert load (1 = the mean)."""

    loss: float
    load_min: float
    load_max: float


@torch.no_grad()
def evaluate(model: DemoModel, held_out: Tensor, windows: int = 96, length: int = 256) -> Evaluation:
    """On `windows` evenly spaced windows, bfloat16: quick, and a little above the full figure."""
    losses, loads = [], []
    for first in range(0, windows, 16):
        begins = [(first + i) * (len(held_out) - length - 1) // windows for i in range(16)]
        ids = torch.stack([held_out[begin : begin + length] for begin in begins])
        targets = torch.stack([held_out[begin + 1 : begin + length + 1] for begin in begins])
        loss, statistics = model.loss(ids, targets, torch.bfloat16)
        losses.append(loss.item())
        loads.append(statistics.load)
    load = torch.stack(loads).mean(0)
    return Evaluation(sum(losses) / len(losses), float(load.min()), float(load.max()))


CURVE_COLUMNS = (
    "step", "tokens", "epochs", "seconds", "learning_rate", "train_loss", "tokens_per_second",
    "held_out_loss", "load_min", "load_max",
)  # fmt: skip


class LossCurve:
    """The CSV file of the run; a resumed run drops the rows after its checkpoint."""

    def __init__(self, path: Path, from_step: int) -> None:
        self.path = path
        rows: list[dict[str, str]] = []
        if from_step and path.exists():
            with path.open(newline="") as file:
                rows = [row for row in csv.DictReader(file) if int(row["step"]) <= from_step]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, CURVE_COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)

    def add(self, row: dict[str, str]) -> None:
        with self.path.open("a", newline="") as file:
            csv.DictWriter(file, CURVE_COLUMNS, lineterminator="\n").writerow(row)
        print(" ".join(f"{name}={value}" for name, value in row.items()), flush=True)


class Training:
    """One run in a work directory: train.npz and held_out.npz in, weights.pt out."""

    EVALUATE_EVERY_STEPS = 500
    REPORT_EVERY_STEPS = 100
    CHECKPOINT_EVERY_STEPS = 200

    def __init__(self, work: Path, recipe: Recipe, curve_path: Path) -> None:
        self.work = work
        self.recipe = recipe
        self.checkpoint_path = work / "checkpoint.pt"
        self.stream = TokenStream(TokenArray.load(work / "train.npz"), recipe.seed)
        held_out = TokenArray.load(work / "held_out.npz").ids.astype(np.int64)
        self.held_out = torch.from_numpy(held_out)
        torch.manual_seed(recipe.seed)
        self.model = DemoModel(Shape())
        self.model.fuse()
        self.dropout = Dropout(recipe.dropout, recipe.seed)
        self.average = WeightAverage(self.model, recipe.average_keep)
        matrices = [p for p in self.model.parameters() if p.dim() >= 2]
        norms = [p for p in self.model.parameters() if p.dim() < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": recipe.weight_decay},
                {"params": norms, "weight_decay": 0.0},
            ],
            lr=recipe.learning_rate, betas=(0.9, 0.95), eps=1e-8, fused=True,
        )  # fmt: skip
        self.step = 0
        self.seconds = 0.0
        if self.checkpoint_path.exists():
            self.load_checkpoint()
        self.curve = LossCurve(curve_path, self.step)
        self.stopping = False

    def save_checkpoint(self) -> None:
        """Writes beside the old checkpoint, then replaces it: a crash leaves one of the two."""
        state: dict[str, Any] = {
            "step": self.step,
            "seconds": self.seconds,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.weights,
        }
        partial = self.checkpoint_path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(self.checkpoint_path)

    def load_checkpoint(self) -> None:
        state = torch.load(self.checkpoint_path)
        self.step, self.seconds = state["step"], state["seconds"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.average.weights = state["average"]
        print(f"resumed at step {self.step}", flush=True)

    def take_step(self) -> float:
        """One optimiser step; returns its training loss in nats (with dropout)."""
        recipe = self.recipe
        phase, position = recipe.batch_of(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.learning_rate_of(self.step)
        self.dropout.reseed(self.step)
        ids, targets = self.stream.batch(position, phase.windows, phase.length)
        loss, statistics = self.model.loss(ids, targets, torch.bfloat16, self.dropout)
        weighted_balance = recipe.balance_weight_of(self.step) * statistics.balance
        (loss + weighted_balance + recipe.z_weight * statistics.z).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.gradient_norm_max, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        if self.step % recipe.average_every_steps == 0:
            self.average.update(self.model)
        return loss.item()

    def run(self, pause_file: Path | None = None) -> None:
        """Trains to the schedule's end, or until SIGINT or SIGTERM asks for a checkpoint and exit.

        While `pause_file` exists the run rests between steps; the rest is not counted as time.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self.ask_to_stop)
        losses: list[float] = []
        reported = self.seconds
        while self.step < self.recipe.steps and not self.stopping:
            while pause_file is not None and pause_file.exists() and not self.stopping:
                time.sleep(1.0)
            began = time.monotonic()
            losses.append(self.take_step())
            self.seconds += time.monotonic() - began
            if self.step % self.REPORT_EVERY_STEPS == 0 or self.step == self.recipe.steps:
                self.report(losses, self.seconds - reported)
                losses, reported = [], self.seconds
            if self.step % self.CHECKPOINT_EVERY_STEPS == 0:
                self.save_checkpoint()
        self.save_checkpoint()
        if self.step == self.recipe.steps:
            self.average.swap(self.model)
            torch.save(self.model.state_dict(), self.work / "weights.pt")
            result = evaluate(self.model, self.held_out)
            print(f"averaged weights: held-out loss {result.loss:.4f}", flush=True)

    def ask_to_stop(self, number: int, frame: FrameType | None) -> None:
        self.stopping = True

    def report(self, losses: list[float], seconds: float) -> None:
        """One row of the loss curve, with a held-out evaluation where one is due.

        `losses` are those since the last row; after a resume, since the resume.
        """
        recipe, step = self.recipe, self.step
        phase, position = recipe.batch_of(step - 1)
        tokens = position + phase.windows * phase.length
        row = {
            "step": f"{step}",
            "tokens": f"{tokens}",
            "epochs": f"{tokens / self.stream.epoch_size:.3f}",
            "seconds": f"{self.seconds:.0f}",
            "learning_rate": f"{recipe.learning_rate_of(step - 1):.3e}",
            "train_loss": f"{sum(losses) / len(losses):.4f}",
            "tokens_per_second": f"{len(losses) * phase.windows * phase.length / seconds:.0f}",
        }
        if step == 200 or step % self.EVALUATE_EVERY_STEPS == 0 or step == recipe.steps:
            result = evaluate(self.model, self.held_out)
            row["held_out_loss"] = f"{result.loss:.4f}"
            row["load_min"], row["load_max"] = f"{result.load_min:.2f}", f"{result.load_max:.2f}"
        self.curve.add(row)
