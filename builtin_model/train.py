"""Train the built-in model and write its weights: `python -m builtin_model.train`.

The weights start with the way to recall laid out (`circuit`). The length starts at 64 tokens and doubles
whenever recall is good; at the last length the learning rate is brought down to zero and the weights are
written in bf16. The loss is the mean surprise of all foreseeable tokens, so that fillers and lists of facts are
modelled too, plus that of the recalled values, plus that of the copied tokens. One seed gives one sequence of
batches; `--minutes` only bounds the time, and cuts the schedule short when it is reached.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from builtin_model import WEIGHTS
from builtin_model.batches import Batch, make_batch
from builtin_model.circuit import lay_out_recall
from builtin_model.vocabulary import BOS_ID, EOS_ID, VOCABULARY_SIZE, build_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MAX_TOKENS = 8192
FIRST_LENGTH = 64
LAST_LENGTH = 2048
TOKENS_PER_STEP = 4096
LEAST_ROWS = 3
PASS_SHORT = 0.95
PASS_LAST = 0.98
WARMUP_STEPS = 100
LEAST_STEPS_AT_LAST_LENGTH = 60
COOLDOWN_STEPS = 250
PEAK_LEARNING_RATE = 3e-3


@dataclass(slots=True)
class Curriculum:
    """Which length to train on and how fast; moves on as recall gets better."""

    length: int = FIRST_LENGTH
    recall: float = 0.0
    steps_at_length: int = 0
    cooled_steps: int | None = None

    @property
    def done(self) -> bool:
        """Whether the learning rate has come down to zero."""
        return self.cooled_steps is not None and self.cooled_steps >= COOLDOWN_STEPS

    def learning_rate(self, step: int) -> float:
        """Warm-up, then the peak, then a straight line to zero."""
        left = 1.0 if self.cooled_steps is None else 1 - self.cooled_steps / COOLDOWN_STEPS
        return PEAK_LEARNING_RATE * left * min(1.0, (step + 1) / WARMUP_STEPS)

    def learn(self, recall: float) -> None:
        """Take in the recall of one batch of the current length."""
        self.recall += 0.1 * (recall - self.recall)
        self.steps_at_length += 1
        if self.cooled_steps is not None:
            self.cooled_steps += 1
        elif self.length < LAST_LENGTH:
            if self.recall >= PASS_SHORT:
                self.length, self.recall, self.steps_at_length = self.length * 2, 0.0, 0
        elif self.recall >= PASS_LAST and self.steps_at_length >= LEAST_STEPS_AT_LAST_LENGTH:
            self.cooled_steps = 0


@dataclass(frozen=True, slots=True)
class StepReport:
    """One step of training: its loss and copying, and the recall at the current length of late."""

    step: int
    loss: float
    recall: float
    copying: float
    length: int
    cooled_steps: int


def model_config() -> LlamaConfig:
    """The shape of the model: half a million parameters, heads as wide as vLLM's CPU attention wants them."""
    return LlamaConfig(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=MAX_TOKENS,
        # The query and key biases let a head attend by distance alone.
        attention_bias=True,
        # Slow rotations let a match far away look like a match nearby.
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
        tie_word_embeddings=True,
        initializer_range=0.08,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )


def new_model(seed: int) -> LlamaForCausalLM:
    """An untrained model, with the way to recall laid out."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(model_config())
    lay_out_recall(model)
    return model


def train(model: LlamaForCausalLM, seed: int, deadline: float) -> Iterator[StepReport]:
    """Train in place until the schedule ends or `time.monotonic()` passes `deadline`; yield every step."""
    rng = random.Random(seed)
    tokenizer = build_tokenizer(MAX_TOKENS)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.01)
    curriculum = Curriculum()
    step = 0
    while not curriculum.done and time.monotonic() < deadline:
        length = _draw_length(rng, curriculum)
        batch = _draw_batch(rng, tokenizer, length)
        for group in optimizer.param_groups:
            group["lr"] = curriculum.learning_rate(step)
        loss, recall, copying = _step(model, optimizer, batch)
        if length == curriculum.length:
            curriculum.learn(recall)
        cooled = curriculum.cooled_steps or 0
        yield StepReport(step, loss, curriculum.recall, copying, curriculum.length, cooled)
        step += 1


def write(model: LlamaForCausalLM, folder: Path) -> None:
    """Write weights in bf16, tokenizer and configuration, as vLLM loads them."""
    model.to(torch.bfloat16).save_pretrained(folder)
    build_tokenizer(MAX_TOKENS).save_pretrained(folder, save_jinja_files=False)


def _draw_length(rng: random.Random, curriculum: Curriculum) -> int:
    """Mostly the current length; sometimes a shorter one, of any size, so that none is forgotten."""
    if curriculum.length == FIRST_LENGTH or rng.random() < 0.75:
        return curriculum.length
    return rng.randrange(FIRST_LENGTH, curriculum.length)


def _draw_batch(rng: random.Random, tokenizer: PreTrainedTokenizerFast, length: int) -> Batch:
    rows = max(LEAST_ROWS, TOKENS_PER_STEP // length)
    copy_rows = max(1, rows // 4)
    return make_batch(rng, tokenizer, length, copy_rows, rows - copy_rows)


def _step(model: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: Batch) -> tuple[float, float, float]:
    """One optimizer step; the loss, and the shares of recalled and of copied tokens that came first."""
    logits = model(batch.ids).logits[:, :-1].flatten(0, 1)
    wanted = batch.ids[:, 1:].flatten()
    targets, answers = batch.targets[:, 1:].flatten(), batch.answers[:, 1:].flatten()
    copies = batch.copies[:, 1:].flatten()
    surprise = functional.cross_entropy(logits, wanted, reduction="none")
    loss = surprise[targets].mean() + surprise[answers].mean() + surprise[copies].mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    hits = (logits.detach().argmax(-1) == wanted).float()
    return loss.item(), hits[answers].mean().item(), hits[copies].mean().item()


def _show(steps: Iterator[StepReport], minutes: float, console: Console) -> None:
    columns = (
        TextColumn("step {task.fields[step]:>5}"),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TextColumn("recall {task.fields[recall]:6.1%}"),
        TextColumn("copying {task.fields[copying]:6.1%}"),
        TextColumn("length {task.fields[length]:>4}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn(f"of at most {minutes:g} min"),
    )
    with Progress(*columns, console=console) as progress:
        start = StepReport(0, 0.0, 0.0, 0.0, FIRST_LENGTH, 0)
        task = progress.add_task("train", total=COOLDOWN_STEPS, **asdict(start))
        length = FIRST_LENGTH
        for at in steps:
            progress.update(task, completed=at.cooled_steps, **asdict(at))
            if at.length > length:
                length = at.length
                console.print(f"length {length} from step {at.step}, loss {at.loss:.3f}")


def main() -> None:
    """Train and write."""
    parser = argparse.ArgumentParser(description="Train the built-in model.")
    parser.add_argument("--minutes", type=float, default=20, help="time limit; the schedule may end before")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=WEIGHTS)
    options = parser.parse_args()
    torch.set_num_threads(2)
    model = new_model(options.seed)
    console = Console()
    console.print(f"{model.num_parameters():,} parameters")
    _show(train(model, options.seed, time.monotonic() + 60 * options.minutes), options.minutes, console)
    write(model, options.output)
    console.print(f"written to {options.output}")


if __name__ == "__main__":
    main()
