"""Step time from facts of model and GPU: the larger of memory traffic and arithmetic, plus a fixed overhead.

    memory     (weights touched + KV read) / (HBM bandwidth x 85 %)
    arithmetic (2 x weights x tokens + 2 x head x requests) / (dense FLOP/s x 60 %)
               + attention FLOP / (dense FLOP/s x 60 %)
    pass       0.5 ms + 30 us x layers + max(memory, arithmetic)

- Bytes, FLOP and bandwidth come from `pagestorm.catalog`; weights and arithmetic are divided by tp_size, KV by the
  ranks that share it (`Model.kv_bytes_per_token`).
- The head (vocabulary x hidden) is computed for one token a request; every other active parameter for each token.
- A token attends to every token before it and to itself: 2 x heads x (k_dim + v_dim) FLOP a pair and layer. A latent
  model (MLA) works on the latent row when it decodes (k_dim = latent + rotary, v_dim = latent) and on expanded heads
  when it prefills.
- A mixture of experts reads min(experts, tokens x experts per token) experts in each layer: no two tokens share one
  until all are read. A dense model reads everything but the input embedding.
- FP8 weights use the GPU's FP8 rate where it has one, everything else its bf16 rate.

The efficiencies (85 %, 60 %) and the overhead (0.5 ms and 30 us a layer) are assumptions, not facts: one set for all
GPUs, chosen so that Llama-3.1-8B (1 rank) and 70B (4 ranks) on A100, H100, H200 and B200 come out near the step times
that aiconfigurator 0.12.0 predicts for SGLang: half of them within 10 %, decode on A100 about 30 % too fast.
Communication between ranks is inside the overhead, which NVLink allows and PCIe does not.
"""

from __future__ import annotations

from collections.abc import Sequence

from pagestorm.catalog import Gpu, Model
from pagestorm.errors import ScenarioError
from pagestorm.steptime.contract import FS_PER_S, count_starts

MEMORY_PERCENT = 85
ARITHMETIC_PERCENT = 60
PASS_OVERHEAD_FS = 500_000_000_000
LAYER_OVERHEAD_FS = 30_000_000_000


class RooflineStepTime:
    """Integer coefficients; for a fixed batch both sides of the max are affine in the context."""

    __slots__ = (
        "all_weights_fs",
        "decode_pair_fs",
        "dense_weights_fs",
        "expert_weights_fs",
        "head_fs",
        "kv_token_fs",
        "overhead_fs",
        "prefill_pair_fs",
        "token_fs",
    )

    def __init__(self, model: Model, gpu: Gpu, tp_size: int) -> None:
        """Raises `ScenarioError` where the catalog lacks a fact that is needed or `tp_size` does not divide."""
        shared, expert = _touched_parameters(model)
        experts = model.num_experts or 0
        weight_bytes = _known(model.computed_weight_bytes, model, "bytes of weights")
        parameters = _known(model.computed_params_total, model, "number of parameters")
        bandwidth = _known(gpu.hbm_bytes_per_s, gpu, "memory bandwidth") * MEMORY_PERCENT
        arithmetic = _flops(model, gpu) * ARITHMETIC_PERCENT * tp_size

        def read_fs(count: int) -> int:
            return _fs(count * weight_bytes, parameters * bandwidth * tp_size)

        self.overhead_fs = PASS_OVERHEAD_FS + LAYER_OVERHEAD_FS * model.num_hidden_layers
        self.dense_weights_fs = read_fs(shared)
        self.expert_weights_fs = read_fs(expert * (model.experts_per_token or 0))
        self.all_weights_fs = read_fs(shared + expert * experts)
        self.kv_token_fs = _fs(model.kv_bytes_per_token(tp_size), bandwidth)
        head = _head_parameters(model)
        per_token = shared + expert * (model.experts_per_token or 0) - head
        self.token_fs = _fs(2 * per_token, arithmetic)
        self.head_fs = _fs(2 * head, arithmetic)
        decode, prefill = _pair_flop(model)
        self.decode_pair_fs = _fs(decode, arithmetic)
        self.prefill_pair_fs = _fs(prefill, arithmetic)

    def decode_fs(self, batch: int, context_tokens: int) -> int:
        memory = self._weights_fs(batch) + self.kv_token_fs * context_tokens
        arithmetic = (self.token_fs + self.head_fs) * batch + self.decode_pair_fs * context_tokens
        return self.overhead_fs + max(memory, arithmetic)

    def decode_run_fs(self, batch: int, context_tokens: int, steps: int) -> int:
        """Both sides grow by a constant each pass, so they cross at most once: sum each side of the crossing."""
        if steps <= 0:
            return 0
        memory = self._weights_fs(batch) + self.kv_token_fs * context_tokens
        arithmetic = (self.token_fs + self.head_fs) * batch + self.decode_pair_fs * context_tokens
        memory_growth = self.kv_token_fs * batch
        arithmetic_growth = self.decode_pair_fs * batch
        lead, gain = memory - arithmetic, memory_growth - arithmetic_growth
        last = lead + gain * (steps - 1)
        total = self.overhead_fs * steps
        if lead >= 0 and last >= 0:
            return total + _series(memory, memory_growth, steps)
        if lead <= 0 and last <= 0:
            return total + _series(arithmetic, arithmetic_growth, steps)
        # The lead changes sign: `before` passes keep the sign of the first one.
        before = -(-abs(lead) // abs(gain))
        after = steps - before
        if lead > 0:
            rest = _series(arithmetic + arithmetic_growth * before, arithmetic_growth, after)
            return total + _series(memory, memory_growth, before) + rest
        rest = _series(memory + memory_growth * before, memory_growth, after)
        return total + _series(arithmetic, arithmetic_growth, before) + rest

    def steps_within(self, batch: int, context_tokens: int, limit_fs: int, most: int) -> int:
        return count_starts(self, batch, context_tokens, limit_fs, most)

    def prefill_fs(self, tokens: Sequence[int], prefixes: Sequence[int]) -> int:
        new = sum(tokens)
        pairs = sum(t * (2 * prefix + t + 1) // 2 for t, prefix in zip(tokens, prefixes, strict=True))
        memory = self._weights_fs(new) + self.kv_token_fs * (new + sum(prefixes))
        arithmetic = self.token_fs * new + self.head_fs * len(tokens) + self.prefill_pair_fs * pairs
        return self.overhead_fs + max(memory, arithmetic)

    def _weights_fs(self, tokens: int) -> int:
        return min(self.dense_weights_fs + self.expert_weights_fs * tokens, self.all_weights_fs)


def _series(first: int, growth: int, count: int) -> int:
    """first + (first + growth) + ..., `count` terms."""
    return first * count + growth * (count * (count - 1) // 2)


def _fs(amount: int, per_second_percent: int) -> int:
    """Femtoseconds for `amount` at a rate given in hundredths, rounded to the nearest."""
    return (amount * FS_PER_S * 100 + per_second_percent // 2) // per_second_percent


def _known(value: int | None, of: Model | Gpu, what: str) -> int:
    if value is None:
        raise ScenarioError(
            f"the catalog has no {what} for {of.name}, which roofline needs; write steptime: {{kind: linear}}",
            key="model" if isinstance(of, Model) else "hardware.gpu",
        )
    return value


def _flops(model: Model, gpu: Gpu) -> int:
    if model.native_weight_format.startswith("fp8") and gpu.fp8_dense_flops is not None:
        return gpu.fp8_dense_flops
    return _known(gpu.bf16_dense_flops, gpu, "dense bf16 FLOP/s")


def _head_parameters(model: Model) -> int:
    return _known(model.vocab_size, model, "vocabulary size") * model.hidden_size


def _touched_parameters(model: Model) -> tuple[int, int]:
    """Parameters that every token touches, and those of one expert in all its layers.

    The table's active parameters are the shared ones and the chosen experts, without the input embedding (unless it is
    the head too); its total has the embedding and every expert.
    """
    active = _known(model.computed_params_active, model, "number of active parameters")
    if not model.num_experts or not model.experts_per_token or model.num_experts == model.experts_per_token:
        return active, 0
    total = _known(model.computed_params_total, model, "number of parameters")
    embedding = 0 if model.tie_word_embeddings else _head_parameters(model)
    idle = model.num_experts - model.experts_per_token
    expert = (total - embedding - active) // idle
    return active - expert * model.experts_per_token, expert


def _pair_flop(model: Model) -> tuple[int, int]:
    """FLOP of one (query, key) pair in all layers, in decode and in prefill."""
    each = 2 * model.num_attention_heads * (model.n_full_attn_layers or 0)
    if model.kv_lora_rank is not None:
        rotary = model.qk_rope_head_dim or 0
        latent = each * (2 * model.kv_lora_rank + rotary)
        return latent, each * ((model.qk_nope_head_dim or 0) + rotary + (model.v_head_dim or 0))
    k_dim = model.head_dim or 0
    pair = each * (k_dim + (model.v_head_dim or k_dim))
    return pair, pair
