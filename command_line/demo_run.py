"""`rachis demo`: three recall questions through both pools, with what happened to each."""

import random
from typing import Any

from rachis import AsyncClient, chat_prompt

from builtin_model import recall
from cluster_configs.loading import LoadedConfig
from command_line.output import out, print_json
from command_line.own_service import target_service
from control_plane.service.state import StateFile

QUESTION_TOKENS = (150, 600, 1400)
_SEED = 2026


async def demo(loaded: LoadedConfig, state_file: StateFile, *, as_json: bool) -> int:
    """Returns 0 when every answer is right and crossed from one pool to the other."""
    rng = random.Random(_SEED)
    answers: list[dict[str, Any]] = []
    async with (
        target_service(None, state_file, loaded, always_own=True) as target,
        AsyncClient(target.address) as client,
    ):
        for tokens in QUESTION_TOKENS:
            answers.append(await _ask(client, recall.make_question(rng, tokens), as_json=as_json))
    right = sum(answer["right"] and answer["kv_bytes"] > 0 for answer in answers)
    verdict = f"{right} of {len(answers)} answers are right and came through both pools; the service has stopped"
    if as_json:
        print_json({"right": right, "total": len(answers), "answers": answers, "start_s": target.start_s})
    else:
        out.print(verdict)
    return 0 if right == len(answers) else 1


async def _ask(client: AsyncClient, question: recall.RecallQuestion, *, as_json: bool) -> dict[str, Any]:
    generated = await client.generate(chat_prompt(question.messages), temperature=0, max_tokens=8)
    answer = generated.text.strip()
    done = generated.completion
    right = answer == question.answer
    if not as_json:
        facts = len(question.facts)
        out.print(
            f"{facts} facts in {done.usage.prompt_tokens} tokens; the question is [bold]{question.question}[/bold]"
        )
        out.print(f"  answer     {answer}  ({'right' if right else f'wrong, it is {question.answer}'})")
        out.print(f"  prefilled  {done.route.prefill_worker_id}, first token after {done.timings.ttft_ms:.0f} ms")
        out.print(f"  decoded    {done.route.decode_worker_id}, {done.usage.completion_tokens} tokens")
        out.print(
            f"  crossed    {done.route.kv_bytes:,} bytes of KV over NIXL for {done.route.pulled_tokens} tokens "
            f"in {done.timings.transfer_ms:.0f} ms\n"
        )
    return {
        "question": question.question,
        "answer": answer,
        "right": right,
        "prompt_tokens": done.usage.prompt_tokens,
        "prefill_worker": done.route.prefill_worker_id,
        "decode_worker": done.route.decode_worker_id,
        "kv_bytes": done.route.kv_bytes,
    }
