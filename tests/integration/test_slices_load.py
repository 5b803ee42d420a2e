"""Every slice of every architecture loads in llama.cpp, with a context: where it aborts, it does so there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from potluck.model.architectures import rules_for
from potluck.model.facts import read_facts
from potluck.model.slices import write_slice
from tiny_models import ARCHITECTURES, write_tiny

# In a process of its own: llama.cpp ends the process where a model breaks one of its assertions.
LOADER = """
import json, sys
import llama_cpp.llama_cpp as api
silent = api.llama_log_callback(lambda level, text, user: None)
api.llama_log_set(silent, None)
api.llama_backend_init()
for path in sys.argv[1:]:
    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    layers = api.llama_model_n_layer(model) if model else 0
    params = api.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch, params.n_threads = 64, 16, 16, 1
    context = api.llama_init_from_model(model, params) if model else None
    vocab = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model)) if model else 0
    print(json.dumps([layers, vocab, bool(context)]), flush=True)
"""

VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    **{arch: (arch, {}) for arch in ARCHITECTURES},
    "llama, tied": ("llama", {"tied": True}),
    "llama with experts": ("llama", {"experts": 4}),
    "llama with biases": ("llama", {"biases": True}),
    "llama with rope factors and arrays": ("llama", {"rope_factors": True, "per_layer_arrays": True}),
    "llama of mixed types": (
        "llama",
        {"types": ("F16", "Q8_0", "Q4_0", "Q4_1"), "embedding_type": "Q8_0", "head_type": "Q4_0"},
    ),
    "llama of K types": (
        "llama",
        {
            "width": 256,
            "feed_forward": 256,
            "types": ("Q4_K", "Q6_K", "Q5_K"),
            "embedding_type": "Q4_K",
            "head_type": "Q6_K",
        },
    ),
    "llama with a byte-pair tokenizer": ("llama", {"tokenizer": "gpt2"}),
    "gemma3 with a period": ("gemma3", {"pattern": 3}),
    "gemma3 with wide heads": ("gemma3", {"head_width": 32}),
}


def loaded(paths: list[Path]) -> list[list[int]]:
    command = [sys.executable, "-c", LOADER, *map(str, paths)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(lines) == len(paths), f"llama.cpp ended at {paths[len(lines)].name}: {ran.stderr[-2_000:]}"
    return lines


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_slice_loads(tmp_path: Path, variant: str) -> None:
    arch, options = VARIANTS[variant]
    layers = 8
    source = write_tiny(tmp_path / "whole.gguf", arch, layers=layers, **options)  # type: ignore[arg-type]
    facts = read_facts(source)
    bounds = (0, *rules_for(facts).cuts(), layers)
    slices = [
        (first, end) for first in bounds for end in bounds if first < end and (first, end) != (0, layers)
    ]
    paths = [tmp_path / f"{first}-{end}.gguf" for first, end in slices]
    for (first, end), path in zip(slices, paths, strict=True):
        write_slice(source, first, end, path)
    expected = [[end - first, facts.vocab if end == layers else 1, True] for first, end in slices]
    assert loaded([source, *paths]) == [[layers, facts.vocab, True], *expected]
