"""SGLang's decisions one at a time, each by the engine's own class or function on a state that is given.

Runs inside the reference environment. Each operation takes the engine and a payload and answers with an object; the
keys are those that the functions read.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pagestorm_real.reference.serving import BadPayload
from pagestorm_real.reference.sglang_engine import Engine, Pools, Shape, model
from pagestorm_real.reference.sglang_recorder import clip as clipped
from pagestorm_real.reference.sglang_run import build
from pagestorm_real.reference.sglang_workload import Fields, Workload, prompt_of_length, read, speculation

ALLOCATORS = ("token", "paged", "swa")


# --- allocators ------------------------------------------------------------------------------------------------


def allocator(engine: Engine, payload: dict[str, Any]) -> dict[str, Any]:
    """Operations on one allocator, in order.

    Payload: `kind` (token | paged | swa), `page_size`, `pool_tokens`, for swa `swa_pool_tokens`, and `operations`:

        ["alloc", tokens]                                   whole pages
        ["alloc_extend", prefix lens, seq lens, last locs]  last loc -1 where there is no prefix
        ["alloc_decode", seq lens, last locs]               lengths after the step
        ["free", slots]   ["free_segment", slots, start]    start: position of the first slot in its request
        ["free_swa", slots]   ["free_swa_segment", slots, start]   ["free_full", slots]: what free_swa left
        ["group_begin"]   ["group_end"]

    The token allocator has `alloc` for both others, as the engine uses it. Answers with a list of `slots` (null when
    refused, absent for frees), `free` (ids in order), `available` (tokens), for swa also `swa_slots` and `swa_free`.
    """
    fields = Fields("allocator", payload)
    kind = fields.one_of("kind", ALLOCATORS, "paged")
    shape = Shape(
        page_size=fields.whole("page_size", 1, 1),
        pool_tokens=fields.whole("pool_tokens", 1),
        rows=0,
        longest_tokens=0,
        window_tokens=1 if kind == "swa" else None,
        swa_pool_tokens=fields.whole("swa_pool_tokens", 1) if kind == "swa" else 0,
    )
    operations = fields.take("operations")
    fields.done()
    if (shape.page_size == 1) != (kind == "token") and kind != "swa":
        raise BadPayload("allocator: the token allocator has pages of one token, the paged one of more")
    with engine.configured(page_size=shape.page_size):
        kv = engine.allocator(shape)
        return {"states": [{**_operate(engine, kv, operation), **_state(kv)} for operation in operations]}


def _operate(engine: Engine, kv: Any, operation: list[Any]) -> dict[str, Any]:
    name, *values = operation
    tensors = [engine.torch.tensor(v, dtype=engine.torch.int64) if isinstance(v, list) else v for v in values]
    frees: dict[str, Callable[..., None]] = {
        "free": lambda slots: kv.free(slots),
        "free_segment": lambda slots, start: kv.free_segment(slots, start_pos=start),
        "free_full": lambda slots: kv.free_full(slots),
        "free_swa": lambda slots: kv.free_swa(slots),
        "free_swa_segment": lambda slots, start: kv.free_swa_segment(slots, start_pos=start),
        "group_begin": lambda: kv.free_group_begin(),
        "group_end": lambda: kv.free_group_end(),
    }
    takes: dict[str, Callable[..., Any]] = {
        "alloc": lambda tokens: kv.alloc(tokens),
        "alloc_extend": lambda prefix, seq, last: kv.alloc_extend(
            prefix, prefix, seq, seq, last, int((seq - prefix).sum())
        ),
        "alloc_decode": lambda seq, last: kv.alloc_decode(seq, seq, last),
    }
    if name in frees:
        frees[name](*tensors)
        return {}
    if name not in takes:
        raise BadPayload(f"allocator: no operation {name!r}; there are {', '.join([*takes, *frees])}")
    slots = takes[name](*tensors)
    if slots is None:
        return {"slots": None}
    swa = {"swa_slots": kv.translate_loc_from_full_to_swa(slots).tolist()} if hasattr(kv, "swa_attn_allocator") else {}
    return {"slots": slots.tolist(), **swa}


def _state(kv: Any) -> dict[str, Any]:
    if not hasattr(kv, "swa_attn_allocator"):
        return {"free": kv.free_pages.tolist(), "available": kv.available_size()}
    return {
        "free": kv.full_attn_allocator.free_pages.tolist(),
        "swa_free": kv.swa_attn_allocator.free_pages.tolist(),
        "available": kv.available_size(),
    }


def decode_oom(engine: Engine, payload: dict[str, Any]) -> dict[str, Any]:
    """A decode step over requests of given KV lengths, with nothing that guards it.

    Payload: `page_size`, `pool_tokens`, `lengths`. Answers with `phase` (prefill | decode | null: which allocation
    failed), the engine's `error` text, and the `available` tokens after the step.
    """
    fields = Fields("decode_oom", payload)
    page_size, pool_tokens = fields.whole("page_size", 1), fields.whole("pool_tokens", 1)
    lengths = fields.whole_numbers("lengths", 1)
    fields.done()
    shape = Shape(page_size, pool_tokens // page_size * page_size, len(lengths), max(lengths) + 1)
    with engine.configured(page_size=page_size, disable_radix_cache=True):
        pools = engine.pools(shape)
        batch = _batch(engine, pools, lengths)
        for phase, allocate in (("prefill", batch.prepare_for_extend), ("decode", batch.prepare_for_decode)):
            try:
                allocate()
            except RuntimeError as error:
                return {"phase": phase, "error": str(error), "available": pools.kv.available_size()}
        return {"phase": None, "error": None, "available": pools.kv.available_size()}


def _batch(engine: Engine, pools: Pools, lengths: list[int]) -> Any:
    """A batch whose prompts have those lengths, ready to be prefilled whole."""
    reqs = [engine.request(i, prompt_of_length(i, n), n + 1) for i, n in enumerate(lengths)]
    for req in reqs:
        req.init_next_round_input(pools.tree)
        req.extend_end = len(req.full_untruncated_fill_ids)
    return engine.batch.init_new(
        reqs, pools.rows, pools.kv, pools.tree, model(max(lengths) + 2), False, engine.speculation.NONE
    )


# --- arrival, ratio, retraction --------------------------------------------------------------------------------


def clip(engine: Engine, scheduler_class: Any, payload: dict[str, Any]) -> dict[str, Any]:
    """What becomes of each request of a workload when it arrives: `max_new`, or `refusal`, the engine's text.

    Payload: a workload as for `run`; only the limits and the requests count.
    """
    workload = read(payload)
    with engine.configured(**workload.arguments()):
        scheduler = build(engine, scheduler_class, workload)
        return {"requests": [_clipped(engine, scheduler, workload, i) for i in range(len(workload.requests))]}


def _clipped(engine: Engine, scheduler: Any, workload: Workload, number: int) -> dict[str, Any]:
    planned = workload.requests[number]
    req = engine.request(number, planned.prompt, planned.max_new)
    refusal = clipped(engine, scheduler, req)
    return {"max_new": None if refusal else req.sampling_params.max_new_tokens, "refusal": refusal or None}


def ratio(engine: Engine, payload: dict[str, Any]) -> dict[str, Any]:
    """The new-token ratio through a sequence of operations.

    Payload: `conservativeness` and `operations`: ["decay", steps], ["reset"], or ["retract", [[generated, max_new],
    ...]] over the requests that stay. Answers with `init`, `floor`, `decay` and `current`, one after each operation.
    """
    fields = Fields("ratio", payload)
    conservativeness = fields.number("conservativeness", 1.0)
    operations = fields.take("operations")
    fields.done()
    with engine.configured(schedule_conservativeness=conservativeness):
        tracker = engine.ratio.from_config()
    current = []
    for operation in operations:
        _move(engine, tracker, *operation)
        current.append(tracker.current)
    return {"init": tracker.init, "floor": tracker.min, "decay": tracker.decay, "current": current}


def _move(engine: Engine, tracker: Any, name: str, value: Any = None) -> None:
    if name == "decay":
        for _ in range(int(value)):
            tracker.decay_step()
    elif name == "reset":
        tracker.reset()
    elif name == "retract":
        kept = [_generated(n, max_new=max_new) for n, max_new in value]
        tracker.current = engine.ratio.estimate_new_token_ratio_after_retract(kept)
    else:
        raise BadPayload(f"ratio: no operation {name!r}; there are decay, reset, retract")


def _generated(tokens: int, input_tokens: int = 0, max_new: int = 0) -> SimpleNamespace:
    """As much of a request as the retraction looks at."""
    return SimpleNamespace(
        output_ids=range(tokens),
        origin_input_ids=range(input_tokens),
        sampling_params=SimpleNamespace(max_new_tokens=max_new),
    )


def retraction_order(engine: Engine, payload: dict[str, Any]) -> dict[str, Any]:
    """Who would be retracted, in which order: positions in the batch, the first victim first.

    Payload: `requests`, [generated, input] each.
    """
    fields = Fields("retraction_order", payload)
    reqs = [_generated(generated, input_tokens) for generated, input_tokens in fields.take("requests")]
    fields.done()
    with engine.configured():
        return {"victims": engine.batch._get_decode_retraction_order(reqs)[::-1]}


def decode_need(engine: Engine, payload: dict[str, Any]) -> dict[str, Any]:
    """Tokens that the memory check of the next decode step asks for.

    Payload: `page_size`, `requests` ([committed, allocated] each), `spec` as for `run` or nothing.
    """
    fields = Fields("decode_need", payload)
    page_size, rows, spec = fields.whole("page_size", 1), fields.take("requests"), speculation(fields.maybe("spec"))
    fields.done()
    with engine.configured(page_size=page_size, **(spec.arguments() if spec else {})):
        batch = engine.batch(
            reqs=[_holding(committed, allocated) for committed, allocated in rows],
            token_to_kv_pool_allocator=SimpleNamespace(page_size=page_size),
            spec_algorithm=engine.speculation.EAGLE if spec else engine.speculation.NONE,
        )
        return {"tokens": batch.new_tokens_required_next_decode()}


def _holding(committed: int, allocated: int) -> SimpleNamespace:
    kv = SimpleNamespace(kv_committed_len=committed, kv_allocated_len=allocated)
    return SimpleNamespace(kv=kv, beam_group=None)


def spec_sizing(engine: Engine, payload: dict[str, Any]) -> dict[str, Any]:
    """What speculation reserves: `alloc_len` and `reserve` a request and decode step, `extra_context` of its row.

    Payload: `page_size`, `spec` as for `run`, `requests`, [committed, allocated] each. Answers also with `current`
    and `next` allocated lengths and the tokens `needed` for all of them.
    """
    fields = Fields("spec_sizing", payload)
    page_size, spec, rows = fields.whole("page_size", 1), speculation(fields.maybe("spec")), fields.take("requests")
    fields.done()
    with engine.configured(page_size=page_size, **(spec.arguments() if spec else {})):
        sizing = engine.sizing
        reserve = sizing.get_alloc_reserve_per_decode()
        reqs = [_holding(committed, allocated) for committed, allocated in rows]
        current, following, needed = sizing.page_aligned_decode_alloc_lens(reqs, reserve=reserve, page_size=page_size)
        return {
            "alloc_len": sizing.get_alloc_len_per_decode(),
            "reserve": reserve,
            "extra_context": sizing.get_req_to_token_extra_context_len(),
            "current": current,
            "next": following,
            "needed": needed,
        }
