"""Measure how well the built-in model recalls, in plain vLLM: `python -m builtin_model.evaluate`.

One in-process engine (fp32, greedy, blocks of 32 tokens) answers fresh random questions, lengths spread evenly
up to the longest, every second one in chat form. An answer counts only when it ends as it should: `blue;` in
plain form, `blue` and the end of the turn in chat form. The exit code is 0 when 95% are right.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from builtin_model import WEIGHTS
from builtin_model.recall import CHAT_EXTRA_TOKENS, RecallQuestion, make_question

if TYPE_CHECKING:
    from vllm import LLM, SamplingParams

LEAST_TOKENS = 20
ANSWER_TOKENS = 2
BUCKET_COUNT = 6
PASS_ACCURACY = 0.95
ENGINE_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One question and the form it is asked in; `tokens` is the length of the plain form."""

    question: RecallQuestion
    tokens: int
    chat: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """A trial and whether it was answered rightly."""

    trial: Trial
    right: bool


def draw_trials(rng: random.Random, trials: int, max_tokens: int) -> list[Trial]:
    """Trials with prompt lengths spread evenly, each length once in plain and once in chat form."""
    drawn = []
    pairs = -(-trials // 2)
    for number in range(trials):
        place = (number // 2) / max(1, pairs - 1)
        tokens = round(LEAST_TOKENS + place * (max_tokens - LEAST_TOKENS))
        drawn.append(Trial(make_question(rng, tokens), tokens, chat=number % 2 == 1))
    return drawn


def answer_trials(llm: LLM, trials: list[Trial]) -> list[Outcome]:
    """Ask every trial in its form."""
    plain = [trial for trial in trials if not trial.chat]
    chat = [trial for trial in trials if trial.chat]
    return _answer_plain(llm, plain) + _answer_chat(llm, chat)


def _answer_plain(llm: LLM, trials: list[Trial]) -> list[Outcome]:
    outputs = llm.generate([trial.question.text for trial in trials], _greedy(), use_tqdm=False)
    return [
        Outcome(trial, right=output.outputs[0].text == f"{trial.question.answer};")
        for trial, output in zip(trials, outputs, strict=True)
    ]


def _answer_chat(llm: LLM, trials: list[Trial]) -> list[Outcome]:
    outputs = llm.chat([trial.question.messages for trial in trials], _greedy(), use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    return [
        Outcome(trial, right=reply.text == trial.question.answer and reply.finish_reason == "stop")
        for trial, reply in zip(trials, completions, strict=True)
    ]


def _greedy() -> SamplingParams:
    from vllm import SamplingParams

    return SamplingParams(max_tokens=ANSWER_TOKENS, temperature=0)


def _start_engine(model: Path, max_tokens: int) -> LLM:
    from vllm import LLM

    return LLM(
        model=str(model),
        dtype="float32",
        block_size=32,
        enforce_eager=True,
        max_model_len=max_tokens + CHAT_EXTRA_TOKENS + ANSWER_TOKENS,
        max_num_seqs=8,
        seed=0,
    )


def _report(outcomes: list[Outcome], max_tokens: int) -> Table:
    """Accuracy by length bucket and form."""
    table = Table("tokens", "plain", "chat", title="recall")
    for bucket in range(BUCKET_COUNT):
        above, upto = (max_tokens * number // BUCKET_COUNT for number in (bucket, bucket + 1))
        inside = [outcome for outcome in outcomes if above < outcome.trial.tokens <= upto]
        table.add_row(f"{above + 1}-{upto}", _share(inside, chat=False), _share(inside, chat=True))
    return table


def _share(outcomes: list[Outcome], chat: bool) -> str:
    right = [outcome.right for outcome in outcomes if outcome.trial.chat == chat]
    return f"{sum(right)}/{len(right)}"


def _evaluate(model: Path, trials: list[Trial], max_tokens: int) -> list[Outcome]:
    # vLLM reads these when it is imported, which is why its imports stand inside functions.
    os.environ.update(ENGINE_ENVIRONMENT)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    llm = _start_engine(model, max_tokens)
    try:
        return answer_trials(llm, trials)
    finally:
        # Without this the process would wait for the engine at exit.
        llm.llm_engine.engine_core.shutdown()


def main() -> int:
    """Evaluate; the last line printed is a JSON object, and with `--json` the only one of ours."""
    parser = argparse.ArgumentParser(description="Measure the recall of the built-in model.")
    parser.add_argument("--model", type=Path, default=WEIGHTS)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=1500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print no table, only the JSON object")
    options = parser.parse_args()
    trials = draw_trials(random.Random(options.seed), options.trials, options.max_tokens)
    outcomes = _evaluate(options.model, trials, options.max_tokens)
    if not options.json:
        Console().print(_report(outcomes, options.max_tokens))
    correct = sum(outcome.right for outcome in outcomes)
    accuracy = correct / len(outcomes)
    print(json.dumps({"trials": len(outcomes), "correct": correct, "accuracy": round(accuracy, 4)}))
    return 0 if accuracy >= PASS_ACCURACY else 1


if __name__ == "__main__":
    sys.exit(main())
