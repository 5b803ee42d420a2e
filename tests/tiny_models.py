"""Writes tiny random models that llama.cpp really loads and runs: one for each architecture of the table.

Weights are normal with a spread of 1/sqrt(inputs), norms are near 1, so the logits differ from token to token. The
vocabulary is small but real (every byte has a token), so text works too. The same arguments give the same file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, TokenType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

ARCHITECTURES = (
    "gemma",
    "gemma2",
    "gemma3",
    "llama",
    "mistral3",
    "phi3",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen3moe",
    "smollm3",
)

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

WORDS = (
    "▁",
    "▁a",
    "▁the",
    "th",
    "he",
    "▁th",
    "in",
    "an",
    "er",
    "▁w",
    "or",
    "ld",
    "lo",
    "el",
    "▁hello",
    "▁world",
    "é",
)

_QK_NORMS = ("gemma3", "qwen3", "qwen3moe")
_POST_NORMS = ("gemma2", "gemma3")
_ALWAYS_TIED = ("gemma", "gemma2")
_EXPERTS = ("qwen2moe", "qwen3moe")


@dataclass
class _Writer:
    """Draws random tensors and hands them to gguf."""

    gguf: GGUFWriter
    chance: np.random.Generator
    types: Sequence[str]
    used: int = 0

    def matrix(self, name: str, *shape: int, kind: str | None = None, spread: float | None = None) -> None:
        """A weight of `shape` as numpy has it (rows of inputs last); its type is the next of `types`."""
        if kind is None:
            kind = self.types[self.used % len(self.types)]
            self.used += 1
        spread = 1 / np.sqrt(shape[-1]) if spread is None else spread
        values = self.chance.normal(0, spread, shape).astype(np.float32)
        self._add(name, values, GGMLQuantizationType[kind])

    def vector(self, name: str, length: int, around: float = 0.0, spread: float = 0.1) -> None:
        self.gguf.add_tensor(name, self.chance.normal(around, spread, length).astype(np.float32))

    def norm(self, name: str, length: int) -> None:
        self.vector(name, length, around=1.0)

    def _add(self, name: str, values: NDArray[np.float32], kind: GGMLQuantizationType) -> None:
        if kind is GGMLQuantizationType.F32:
            self.gguf.add_tensor(name, values)
            return
        raw = self._k_blocks(values, kind) if kind.name.endswith("_K") else quantize(values, kind)
        self.gguf.add_tensor(name, raw, raw_shape=None, raw_dtype=kind)

    def _k_blocks(self, values: NDArray[np.float32], kind: GGMLQuantizationType) -> NDArray[np.uint8]:
        """Random blocks of a K type (gguf can only unpack those) with about the spread of `values`."""
        block, size = GGML_QUANT_SIZES[kind]
        shape = (*values.shape[:-1], values.shape[-1] // block, size)
        raw = self.chance.integers(0, 256, shape, dtype=np.uint8)
        last = size - 2
        places = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (last,), "Q2_K": (last - 2, last), "Q3_K": (last,)}
        for at in places[kind.name]:
            raw[..., at : at + 2] = np.frombuffer(np.float16(1).tobytes(), np.uint8)
        flat = raw.reshape(*values.shape[:-1], -1)
        spread = float(dequantize(flat, kind).std())
        for at in places[kind.name]:
            raw[..., at : at + 2] = np.frombuffer(np.float16(values.std() / spread).tobytes(), np.uint8)
        return raw.reshape(*values.shape[:-1], -1)


def write_tiny(
    path: Path,
    arch: str = "llama",
    *,
    layers: int = 4,
    tied: bool = False,
    seed: int = 0,
    width: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    head_width: int | None = None,
    feed_forward: int = 128,
    experts: int = 0,
    biases: bool | None = None,
    types: Sequence[str] = ("F32",),
    embedding_type: str = "F32",
    head_type: str = "F32",
    window: int = 8,
    pattern: int | Sequence[bool] | None = None,
    per_layer_arrays: bool = False,
    rope_factors: bool = False,
    context: int = 512,
    tokenizer: str = "llama",
    template: str | None = CHATML,
    name: str | None = None,
) -> Path:
    """Writes a random model of one architecture to `path` and returns it.

    `types` are cycled through the weights of the blocks (K types need a width and a feed_forward of multiples of 256).
    `window` and `pattern` (a period, or a list of one bool per layer) shape sliding windows. `experts` makes llama a
    Mixtral. `per_layer_arrays` writes head counts and the like as a number per layer. `tokenizer`: "llama" or "gpt2".
    """
    if arch not in ARCHITECTURES:
        raise ValueError(f"no tiny {arch}")
    experts = experts or (4 if arch in _EXPERTS else 0)
    biases = arch in ("qwen2", "qwen2moe") if biases is None else biases
    rope_factors = rope_factors or arch == "phi3"
    head_width = head_width or width // heads
    chance = np.random.default_rng(seed)
    gguf = GGUFWriter(path, arch)
    out = _Writer(gguf, chance, types)

    def numbers(value: int) -> int | list[int]:
        return [value] * layers if per_layer_arrays else value

    gguf.add_name(name or f"tiny {arch}")
    gguf.add_block_count(layers)
    gguf.add_context_length(context)
    gguf.add_embedding_length(width)
    gguf.add_feed_forward_length(numbers(feed_forward))
    gguf.add_head_count(numbers(heads))
    gguf.add_head_count_kv(numbers(kv_heads))
    gguf.add_layer_norm_rms_eps(1e-5)
    gguf.add_rope_freq_base(10_000.0)
    gguf.add_rope_dimension_count(head_width)
    if head_width != width // heads:
        gguf.add_key_length(head_width)
        gguf.add_value_length(head_width)
    if experts:
        gguf.add_expert_count(experts)
        gguf.add_expert_used_count(2)
    if arch in _EXPERTS:
        gguf.add_expert_feed_forward_length(feed_forward)
    if arch == "qwen2moe":
        gguf.add_expert_shared_feed_forward_length(feed_forward)
    if arch in ("gemma2", "gemma3"):
        gguf.add_sliding_window(window)
        if pattern is not None:
            key = f"{arch}.attention.sliding_window_pattern"
            if isinstance(pattern, int):
                gguf.add_uint32(key, pattern)
            else:
                gguf.add_array(key, [bool(windowed) for windowed in pattern])
    if arch == "gemma2":
        gguf.add_attn_logit_softcapping(50.0)
        gguf.add_final_logit_softcapping(30.0)
    if arch == "gemma3":
        gguf.add_float32("gemma3.rope.freq_base_swa", 1_000.0)
    if arch == "phi3":
        gguf.add_rope_scaling_orig_ctx_len(context // 2)
        gguf.add_rope_scaling_attn_factors(1.1)

    vocab = _add_tokenizer(gguf, tokenizer, template)
    out.matrix("token_embd.weight", vocab, width, kind=embedding_type, spread=1 / np.sqrt(width))
    out.norm("output_norm.weight", width)
    if not tied and arch not in _ALWAYS_TIED:
        out.matrix("output.weight", vocab, width, kind=head_type, spread=3 / np.sqrt(width))
    if rope_factors and arch == "phi3":
        for length in ("long", "short"):
            out.vector(f"rope_factors_{length}.weight", head_width // 2, around=1.5)
    elif rope_factors:
        out.vector("rope_freqs.weight", head_width // 2, around=1.5)
    for layer in range(layers):
        _add_block(
            out, arch, f"blk.{layer}", width, heads, kv_heads, head_width, feed_forward, experts, biases
        )
    gguf.write_header_to_file()
    gguf.write_kv_data_to_file()
    gguf.write_tensors_to_file()
    gguf.close()
    return path


def _add_block(
    out: _Writer,
    arch: str,
    block: str,
    width: int,
    heads: int,
    kv_heads: int,
    head_width: int,
    feed_forward: int,
    experts: int,
    biases: bool,
) -> None:
    queries, keys = heads * head_width, kv_heads * head_width
    out.norm(f"{block}.attn_norm.weight", width)
    if arch == "phi3":
        out.matrix(f"{block}.attn_qkv.weight", queries + 2 * keys, width)
    else:
        for part, rows in (("q", queries), ("k", keys), ("v", keys)):
            out.matrix(f"{block}.attn_{part}.weight", rows, width)
            if biases:
                out.vector(f"{block}.attn_{part}.bias", rows)
    if arch in _QK_NORMS:
        out.norm(f"{block}.attn_q_norm.weight", head_width)
        out.norm(f"{block}.attn_k_norm.weight", head_width)
    out.matrix(f"{block}.attn_output.weight", width, queries)
    if biases and arch == "llama":
        out.vector(f"{block}.attn_output.bias", width)
    if arch in _POST_NORMS:
        out.norm(f"{block}.post_attention_norm.weight", width)
        out.norm(f"{block}.post_ffw_norm.weight", width)
    out.norm(f"{block}.ffn_norm.weight", width)
    if experts:
        out.matrix(f"{block}.ffn_gate_inp.weight", experts, width, kind="F32")
        out.matrix(f"{block}.ffn_gate_exps.weight", experts, feed_forward, width)
        out.matrix(f"{block}.ffn_up_exps.weight", experts, feed_forward, width)
        out.matrix(f"{block}.ffn_down_exps.weight", experts, width, feed_forward)
        if arch == "qwen2moe":
            out.vector(f"{block}.ffn_gate_inp_shexp.weight", width)
            out.matrix(f"{block}.ffn_gate_shexp.weight", feed_forward, width)
            out.matrix(f"{block}.ffn_up_shexp.weight", feed_forward, width)
            out.matrix(f"{block}.ffn_down_shexp.weight", width, feed_forward)
        return
    if arch == "phi3":
        out.matrix(f"{block}.ffn_up.weight", 2 * feed_forward, width)
    else:
        out.matrix(f"{block}.ffn_gate.weight", feed_forward, width)
        out.matrix(f"{block}.ffn_up.weight", feed_forward, width)
    out.matrix(f"{block}.ffn_down.weight", width, feed_forward)
    if biases and arch == "llama":
        out.vector(f"{block}.ffn_gate.bias", feed_forward)
        out.vector(f"{block}.ffn_up.bias", feed_forward)
        out.vector(f"{block}.ffn_down.bias", width)


# ---- vocabulary


def _add_tokenizer(gguf: GGUFWriter, kind: str, template: str | None) -> int:
    """Writes the tokenizer and returns the number of its tokens."""
    tokens = [*(_spm_tokens() if kind == "llama" else _bpe_tokens())]
    gguf.add_tokenizer_model(kind)
    gguf.add_token_list([text for text, _, _ in tokens])
    gguf.add_token_types([int(kind) for _, _, kind in tokens])
    if kind == "llama":
        gguf.add_tokenizer_pre("default")
        gguf.add_token_scores([score for _, score, _ in tokens])
        gguf.add_bos_token_id(1)
        gguf.add_eos_token_id(2)
        gguf.add_unk_token_id(0)
        gguf.add_add_bos_token(True)
    else:
        gguf.add_tokenizer_pre("gpt-2")
        gguf.add_token_merges(["t h", "th e", "Ġ the", "i n", "a n", "e r", "l o", "Ġ w"])
        gguf.add_eos_token_id(0)
        gguf.add_bos_token_id(0)
        gguf.add_add_bos_token(False)
    if template is not None:
        gguf.add_chat_template(template)
    return len(tokens)


def _spm_tokens() -> Sequence[tuple[str, float, TokenType]]:
    return [
        ("<unk>", 0.0, TokenType.UNKNOWN),
        ("<s>", 0.0, TokenType.CONTROL),
        ("</s>", 0.0, TokenType.CONTROL),
        *((f"<0x{byte:02X}>", 0.0, TokenType.BYTE) for byte in range(256)),
        ("<|im_start|>", 0.0, TokenType.CONTROL),
        ("<|im_end|>", 0.0, TokenType.CONTROL),
        ("<|endoftext|>", 0.0, TokenType.CONTROL),  # llama.cpp's phi3 insists on it
        *((word, -float(index + 1), TokenType.NORMAL) for index, word in enumerate(WORDS)),
        *((chr(letter), -100.0 - letter, TokenType.NORMAL) for letter in range(ord("a"), ord("z") + 1)),
    ]


def _bpe_tokens() -> Sequence[tuple[str, float, TokenType]]:
    return [
        ("<|endoftext|>", 0.0, TokenType.CONTROL),
        ("<|im_start|>", 0.0, TokenType.CONTROL),
        ("<|im_end|>", 0.0, TokenType.CONTROL),
        *((text, 0.0, TokenType.NORMAL) for text in _byte_letters()),
        *((text, 0.0, TokenType.NORMAL) for text in ("th", "the", "Ġthe", "in", "an", "er", "lo", "Ġw")),
    ]


def _byte_letters() -> list[str]:
    """GPT-2's printable letter for each byte: itself where it prints, else one from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256))
    return [chr(byte) if byte in printable else chr(256 + next(others)) for byte in range(256)]
