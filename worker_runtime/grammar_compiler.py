"""Compiles grammars as vLLM's engines do, in a process that can be ended over one that explodes.

    python -m worker_runtime.grammar_compiler FOLDER_OF_THE_MODEL VOCABULARY_SIZE MEMORY_MIB

Each line it reads is a `rachis.v1.StructuredOutputs` in base64; each line it writes is JSON with `problem`: what is
wrong with it, or nothing. The first line, `{}`, says that it is ready. It ends with its input, and with its parent.
"""

import base64
import json
import os
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rachis.v1 import generation_pb2 as generation

from cluster_core.bound_child import bind_to_parent
from cluster_core.engine_jobs import StructuredOutputs
from worker_runtime.wire_conversion import from_wire

# Of what a compiler says.
_MOST_CHARACTERS = 500


def make_compiler(folder: str, vocabulary_size: int) -> Callable[[StructuredOutputs], str]:
    """Checks and compiles, of the tokenizer in a folder, as `vllm serve` would; gives the problem, or an empty text."""
    from transformers import AutoTokenizer
    from vllm import SamplingParams
    from vllm.config import StructuredOutputsConfig
    from vllm.exceptions import VLLMClientError
    from vllm.sampling_params import check_json_nesting
    from vllm.v1.structured_output.backend_xgrammar import XgrammarBackend, validate_xgrammar_grammar
    from vllm.v1.structured_output.request import get_structured_output_key

    from worker_runtime.vllm_arguments import STRUCTURED_OUTPUTS_BACKEND
    from worker_runtime.vllm_conversion import structured_outputs_params

    settings: Any = SimpleNamespace(
        model_config=None,
        speculative_config=None,
        structured_outputs_config=StructuredOutputsConfig(backend=STRUCTURED_OUTPUTS_BACKEND),
    )
    tokenizer = AutoTokenizer.from_pretrained(folder)
    backend = XgrammarBackend(settings, tokenizer, vocabulary_size)

    def problem_of(wanted: StructuredOutputs) -> str:
        try:
            params = structured_outputs_params(wanted)
            check_json_nesting(params.structural_tag, structural_tag=True)
            validate_xgrammar_grammar(SamplingParams(structured_outputs=params))
            backend.compile_grammar(*get_structured_output_key(params))
        except (ValueError, TypeError, KeyError, RuntimeError, VLLMClientError) as error:
            return " ".join(str(error).split())[:_MOST_CHARACTERS] or type(error).__name__
        return ""

    return problem_of


def _limit_memory(mib: int) -> None:
    """What it has is kept; it gets so much more."""
    has_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit = has_bytes + (mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main(folder: str, vocabulary_size: int, memory_mib: int) -> None:
    bind_to_parent()
    with os.fdopen(os.dup(1), "w") as answers:
        # Whatever a library prints goes with its log.
        os.dup2(2, 1)
        problem_of = make_compiler(folder, vocabulary_size)
        problem_of(StructuredOutputs(regex="a"))
        _limit_memory(memory_mib)
        print("{}", file=answers, flush=True)
        for line in sys.stdin:
            wanted = generation.StructuredOutputs.FromString(base64.b64decode(line))
            print(json.dumps({"problem": problem_of(from_wire(wanted, StructuredOutputs))}), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
