"""What speculative decoding adds to memory in SGLang: draft layers, their KV, and how far a decode step allocates.

Rules: sglang 0.5.23, `arg_groups/speculative_hook.py`, `mem_cache/allocation_sizing.py`,
`model_executor/model_runner_components/spec_aux_hidden_state.py`.
"""

from __future__ import annotations

from typing import NamedTuple

from pagestorm.catalog.shape import Shape
from pagestorm.sizing.account import Account
from pagestorm.sizing.options import Options

RUNNING_WITH_SPECULATION = 48
"""`--max-running-requests` where speculation is on and it is not given."""
DRAFT_KV = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
UNCOUNTED_DRAFTS = ("Qwen3_5", "MiniMaxM2")
"""Architectures whose config does not call its draft layers `num_nextn_predict_layers`, so that the engine adds
nothing to the target's KV for a draft without a path."""
LLAMA_PARAMETERS, OTHER_PARAMETERS = (5, 4, 8), (3, 1, 4)


class Speculation(NamedTuple):
    """Steps, branches and draft tokens; draft layers, as they count for KV and for weights."""

    algorithm: str
    steps: int
    topk: int
    draft_tokens: int
    kv_layers: int
    weight_layers: int
    draft_path: str

    @property
    def packed(self) -> bool:
        """Whether the draft's KV (MTP layers) is packed beside the target's in a host pool, not in one of its own."""
        return self.algorithm in ("EAGLE", "NEXTN") and not self.draft_path

    def alloc_len(self, page_size: int) -> int:
        """Slots that one decode step of a request may allocate."""
        if page_size == 1 or self.topk == 1 or self.algorithm not in DRAFT_KV:
            return max(self.steps * self.topk, self.draft_tokens)
        pages = -(-(page_size - 1 + self.steps) // page_size)
        return max(pages * page_size * self.topk, self.draft_tokens)


def speculation(options: Options, shape: Shape, account: Account) -> Speculation | None:
    """The speculation that the flags ask for; None for none."""
    algorithm = options.text("speculative_algorithm").upper()
    if not algorithm or algorithm == "NONE":
        return None
    chosen = LLAMA_PARAMETERS if shape.architecture == "LlamaForCausalLM" else OTHER_PARAMETERS
    if algorithm == "STANDALONE":
        chosen = OTHER_PARAMETERS
    steps = options.maybe("speculative_num_steps") or chosen[0]
    topk = options.maybe("speculative_eagle_topk") or chosen[1]
    tokens = options.maybe("speculative_num_draft_tokens") or chosen[2]
    path = options.text("speculative_draft_model_path")
    if algorithm not in DRAFT_KV:
        if algorithm != "NGRAM":
            account.warn(f"the KV and weights of a {algorithm} draft are not counted; give them with measured figures")
        return Speculation(algorithm, steps, topk, tokens, 0, 0, path)
    if path:
        layers = _draft_layers(path, account)
        return Speculation(algorithm, steps, topk, tokens, layers, layers, path)
    own = shape.draft_layers or 0
    counted = 0 if shape.architecture.startswith(UNCOUNTED_DRAFTS) else own
    if own != counted:
        account.warn("the engine adds no KV for this model's draft layers to the size of a token")
    if not own:
        account.warn(f"{shape.name} has no draft layers of its own; {algorithm} needs --speculative-draft-model-path")
    return Speculation(algorithm, steps, topk, tokens, counted, own, path)


def _draft_layers(path: str, account: Account) -> int:
    # Imported here: few launches have a draft model of their own.
    from pagestorm.catalog import model
    from pagestorm.errors import ScenarioError

    try:
        return model(path).num_hidden_layers
    except ScenarioError:
        account.warn(f"the draft model {path} is not in the catalog: one layer like the target's is assumed for it")
        return 1
