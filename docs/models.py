"""Writes `docs/models.md`: every causal language model of the installed Transformers, tiny and random, on trees.

``python docs/models.py`` (``make models``) makes the page; names of types as arguments print their rows instead. Each
type is made from its own configuration with small sizes. Log-probs and gradients of a random tree of several levels are
compared with those of its sequences under plain Transformers, whose attention is "eager"; then greedy answers of the
native engine with those of ``generate``.
"""

from __future__ import annotations

import inspect
import json
import logging
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rolltree.engine import EngineConfig, NativeEngine, SamplingParams, TokenTree, UserError, batch_logprob, pack
from rolltree.engine.integrations.trees import odd_layers
from rolltree.engine.model import attention
from rolltree.engine.model.invariant.install import make_invariant
from rolltree.engine.model.recurrent import FAMILIES, scanned
from rolltree.engine.model.routes import ROUTERS
from rolltree.engine.model.self_check import own_logprobs
from rolltree.engine.rollout.equal_bits import other_bits

PAGE = Path(__file__).parent / "models.md"
BATCH = 12  # types that one process measures
SECONDS = 120  # for each type
LARGEST = 20_000_000  # parameters; a configuration of other names stays too large
EXACT = 1e-4  # nats of log-prob, and relative norm of a parameter's gradient
VOCABULARY = 97
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "n_embd": 32, "d_model": 32, "dim": 32, "intermediate_size": 48,
    "ffn_dim": 48, "num_hidden_layers": 2, "n_layer": 2, "num_layers": 2, "n_layers": 2, "num_attention_heads": 4,
    "n_head": 4, "n_heads": 4, "num_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "n_positions": 256, "max_seq_len": 256, "sliding_window": 6, "attention_chunk_size": 5, "num_experts": 4,
    "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "top_k_experts": 2,
    "moe_intermediate_size": 16, "moe_topk": 2, "shared_expert_intermediate_size": 16, "kv_lora_rank": 8,
    "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 6, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "word_embed_proj_dim": 32, "global_head_dim": 16,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1, "logit_scale": 0.5, "logits_scaling": 2.0,
    "attention_dropout": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "initializer_range": 0.2,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": True, "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 2, "swa_head_dim": 8, "swa_v_head_dim": 6, "mlp_hidden_size": 48,
}  # fmt: skip
"""Sizes by the names that configurations give them; a type gets those that it has."""
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8, "mamba_chunk_size": 32,
    "mamba_expand": 2,
}  # fmt: skip
CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
OWN_SIZES: dict[str, dict[str, Any]] = {
    "kimi_linear": {"num_experts_per_token": 2, "linear_head_dim": 8, "linear_num_heads": 4},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "granitemoehybrid": MAMBA | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 48},
    "lfm2": CONV,
    "lfm2_moe": CONV | {"num_dense_layers": 1},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "full_attention"], "mamba_num_heads": 4, "mamba_head_dim": 16,
        "n_groups": 2, "ssm_state_size": 8, "chunk_size": 32,
    },
}  # fmt: skip
"""Sizes of a type that other types do not have, and layers of each of its kinds."""
LIST_FIELDS = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types", "no_rope_layers")
OPTIONAL = ("head_dim", "num_key_value_heads", "n_group", "topk_group", "num_experts_per_tok", "n_routed_experts")
"""Sizes that are set where a configuration leaves them out."""
REFUSED, PLAIN, TREES, ENGINE = (
    "refused",
    "plain sequences only",
    "exact on trees",
    "exact on trees and in the native engine",
)


def small_config(name: str) -> Any:
    """Return the configuration of a type with small sizes, its lists of layers cut to two."""
    default = AutoConfig.for_model(name)
    text = default.get_text_config()
    fields = text.to_dict()
    given = {k: v for k, v in SMALL.items() if fields.get(k) is not None or (k in OPTIONAL and k in fields)}
    if "kv_lora_rank" in given and "num_key_value_heads" in given:
        given["num_key_value_heads"] = given["num_attention_heads"]
    if given.get("num_kv_shared_layers"):  # they need a layer of each kind before them
        given |= {"num_hidden_layers": 4, "num_kv_shared_layers": 2}
    for field in LIST_FIELDS:
        kinds = fields.get(field)
        if isinstance(kinds, list) and kinds and "num_hidden_layers" in given:
            distinct = list(dict.fromkeys(kinds))
            given[field] = (distinct * 4)[: given["num_hidden_layers"]]
    given |= OWN_SIZES.get(text.model_type, {})
    if "layers_block_type" in OWN_SIZES.get(text.model_type, {}):  # the list alone says how many layers there are
        given.pop("num_hidden_layers", None)
    made = type(text)(**given) if text is default else type(default)(text_config=given)
    made.get_text_config().tie_word_embeddings = False
    return made


def models(name: str) -> tuple[Any, Any]:
    """Return a random model with rolltree's attention, and its copy under plain Transformers."""
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(small_config(name)).parameters())
    if size > LARGEST:
        raise ValueError(f"its sizes have other names: {size / 1e6:.0f} M parameters")
    both = []
    for implementation in (attention.NAME, "eager"):
        config = small_config(name)
        torch.manual_seed(0)
        both.append(AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval())
    ours, plain = both
    for key, parameter in ours.named_parameters():  # none is left at 0, as sinks and biases are
        noise = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(len(key)))
        parameter.data.add_(0.1 * noise.to(parameter.dtype))
        if key.endswith("A_log"):  # as drawn, recurrent layers forget within a token
            parameter.data.copy_(torch.linspace(0.01, 0.3, parameter.numel()).view_as(parameter).log())
    plain.load_state_dict(ours.state_dict())
    return ours.float(), plain.float()


def tree_of(seed: int = 0) -> TokenTree:
    """Return a tree of three levels, with paths longer than the windows."""
    draw = np.random.default_rng(seed)
    prompt, a, b, c, d, e = (draw.integers(5, VOCABULARY - 5, size=n).tolist() for n in (5, 6, 4, 9, 3, 7))
    return TokenTree.from_sequences(prompt, [a + b, a + c, a + b[:2] + d, e, e[:4] + d + b])


def errors(ours: Any, plain: Any, *, pieces: bool = False) -> tuple[float, float]:
    """Return the largest difference of log-probs, and of a parameter's gradient relative to the norm of all of them."""
    trees = [tree_of(0), tree_of(1)]
    (batch,) = pack(trees, max_tokens=4096)
    weights = torch.randn(len(batch.target), generator=torch.Generator().manual_seed(0))
    got = batch_logprob(ours, batch).logprob
    (got * weights).sum().backward()
    differences, loss = [], torch.zeros(())
    for tree, mine, own in zip(trees, batch.to_leaves(got.detach()), batch.to_leaves(weights), strict=True):
        counted = set()
        for leaf, (values, flat, w) in enumerate(zip(mine, own_logprobs(plain, tree), own, strict=True)):
            differences.append((values - flat).abs().max())
            for row, value, weight in zip(tree.response_rows(leaf).tolist(), flat, w, strict=True):
                if row not in counted:  # the tree has a shared token once
                    counted.add(row)
                    loss = loss + value * weight
    loss.backward()
    pairs = [
        (mine.grad, theirs.grad)
        for mine, theirs in zip(ours.parameters(), plain.parameters(), strict=True)
        if theirs.grad is not None
    ]
    size = torch.stack([theirs.norm() for _, theirs in pairs]).norm()
    of_gradients = max(float((mine - theirs).norm() / size) if mine is not None else 1.0 for mine, theirs in pairs)
    return float(torch.stack(differences).max()), of_gradients


def answers_differ(ours: Any, plain: Any) -> bool:
    """Return True if a greedy answer of the native engine is not that of ``generate``."""
    plain.generation_config.eos_token_id = ours.generation_config.eos_token_id = None
    prompts = [tree_of(seed).flatten()[0].prompt + [7 + seed] * seed for seed in range(2)]
    engine = NativeEngine(ours, None, EngineConfig(kv_tokens=512))
    params = SamplingParams(n=2, temperature=0.0, max_new_tokens=14, ignore_eos=True)
    for prompt, tree in zip(prompts, engine.generate(prompts, params), strict=True):
        ids = torch.tensor([prompt])
        wanted = plain.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=14, do_sample=False)
        if any(leaf.response != wanted[0, len(prompt) :].tolist() for leaf in tree.flatten()):
            return True
    return False


def equal_bits(ours: Any) -> str:
    """Return whether `model.batch_invariant` holds in fp32 and in bf16, or the layer that it does not hold for."""
    if names := scanned(ours):
        return f"no: `{names[0]}`"
    found = [other_bits(make_invariant(ours.to(dtype))) for dtype in (torch.float32, torch.bfloat16)]
    return "yes" if found == [None, None] else f"no: `{found[0] or found[1]}`"


def measured(name: str) -> dict[str, Any]:
    """Return a type's row: what is exact, the errors, and a remark."""
    row: dict[str, Any] = {"type": name, "state": REFUSED, "logprob": None, "gradient": None, "bits": "", "remark": ""}
    try:
        ours, plain = models(name)
    except Exception as error:  # a type may need a package, or sizes of its own
        return row | {"state": "not made", "remark": _sentence(error)}
    try:
        own_logprobs(plain, tree_of())
    except Exception as error:
        return row | {"state": "not made", "remark": f"its own forward: {_sentence(error)}"}
    if ours.config.get_text_config().model_type not in FAMILIES and (kinds := odd_layers(ours)):
        return row | {"remark": f"layers of the kind {', '.join(kinds)}"}
    try:
        row["logprob"], row["gradient"] = errors(ours, plain)
    except UserError as error:
        return row | {"remark": _sentence(error)}
    except (ValueError, RuntimeError, TypeError, AttributeError) as error:
        named = isinstance(error, ValueError) and any(w in str(error) for w in ("trees", "fused head", "own forward"))
        return row | {"state": PLAIN if named else "FAILS", "remark": _sentence(error)}
    if not (row["logprob"] < EXACT and row["gradient"] < EXACT):
        return row | {"state": "WRONG"}
    row["state"] = TREES
    try:
        if answers_differ(ours, plain):
            return row | {"remark": "greedy answers of the native engine differ"}
    except Exception as error:
        return row | {"remark": f"native engine: {_sentence(error)}"}
    return row | {"state": ENGINE, "bits": equal_bits(ours)}


def _sentence(error: Exception) -> str:
    first = (" ".join(str(error).split()) or type(error).__name__)[:200].replace("|", "/")
    return f"{'' if isinstance(error, ValueError | UserError) else type(error).__name__ + ': '}{first}"


def rows(names: list[str]) -> list[dict[str, Any]]:
    """Measure types in processes of their own; one that stops a process is a row too."""
    found: list[dict[str, Any]] = []
    for i in range(0, len(names), BATCH):
        some = names[i : i + BATCH]
        while some:
            try:
                done = subprocess.run(
                    [sys.executable, __file__, "--json", *some],
                    capture_output=True,
                    text=True,
                    timeout=SECONDS * len(some),
                ).stdout
            except subprocess.TimeoutExpired as late:
                done = (late.stdout or b"").decode()
            got = [json.loads(line) for line in done.splitlines() if line.startswith("{")]
            if len(got) < len(some):
                got.append({"type": some[len(got)], "state": "not made", "logprob": None, "gradient": None,
                            "bits": "", "remark": "stops or fills its process"})  # fmt: skip
            found += got
            some = some[len(got) :]
    return found


def page(found: list[dict[str, Any]]) -> str:
    """Return the page."""
    lines = [inspect.cleandoc(f"""
        # Models

        Every causal language model type of Transformers {transformers.__version__}, tiny, random and in fp32, measured
        by `make models`. Errors compare a tree of three levels with its sequences under plain Transformers: the largest
        difference of a log-prob in nats, and of a parameter's gradient relative to the norm of the whole gradient. A
        type is exact where both are below {EXACT:g}; in the native engine where greedy answers equal those of
        `generate`, token for token. Bits are equal where the log-probs of sampled tokens are, with
        `model.batch_invariant` (docs/exactness.md), those of training in fp32 and bf16, to the last bit; elsewhere the
        layer is named. Types that are refused, or for plain sequences only, raise an error that says so.

        Nemotron-H does not agree to rounding in float64 either, since Transformers casts to float32 there: `A_log`, the
        inputs of the scan (`mamba2_chunk_scan`; those of trees stay float64), norms and the softmax of attention.
        Without these casts log-probs agree to 1e-15 and gradients to 1e-12 (`tests/engine/model/test_recurrent.py`);
        with them the gradient of `A_log`, a sum over paths that nearly cancels, is off most.

        `model.replay_routes` (docs/trees.md) knows these routers of mixtures of experts and refuses others:
        {", ".join(f"`{name}`" for name in sorted(ROUTERS))}.

        ## LoRA adapters

        `[model.lora]` (needs peft: `rolltree[lora]`) trains an adapter; `recipe = "lora_rl"` is one of rank 64 on all
        linear layers except the head. A layer computes `x W' + s (x A') B'`, with s = alpha / sqrt(rank), or
        alpha / rank with `rslora = false`. There is no dropout. The model's weights W stay as they are:

        - The optimiser has masters and moments of A and B alone.
        - A reference without a path is the model with its adapter off, and needs no copy. With `reset_every` or `ema`
          it is a copy of the adapter.
        - A sampler that shares the trained model samples with the adapter. One with weights of its own (sampling
          during updates, `rollout.engines`, vLLM) has the adapter too and gets A and B after every update, a small part
          of the weights' bytes. vLLM takes ranks up to 512. With `enable_lora = false` in `rollout.vllm_options`, for
          models whose adapters it does not support, and with an adapter in the head it gets `W + s B A`, computed in
          fp32 and rounded to the model's dtype: in bfloat16 it does not see a change that is smaller than the rounding
          of W. Digests and the canary prompt check what was sent.
        - A checkpoint holds the adapter, its moments and a digest of W; a run does not resume on another W.
        - `export` holds `W + s B A` for plain Transformers, and `export/adapter` the adapter for
          `peft.PeftModel.from_pretrained`.
        - A head that shares its weight with the embedding and a vision tower have no adapter.
        - Several ranks (`trainer.ranks`) shard it with the model and learn what one process learns.

        With `[model.lora.extrapolate]` (NExt, recipe `next`) the export has the weights that small networks predict
        from the adapters of earlier updates: `W + s B A + scale * u sigma v^T`, a change of rank 1 in each layer. The
        run itself, its evaluation and `export/adapter` are without it; a further stage continues from the export
        (docs/loop.md). The kept adapters are in the host's memory and in checkpoints.
        """), ""]  # fmt: skip
    for state in sorted({row["state"] for row in found}, key=[ENGINE, TREES, PLAIN, REFUSED, "not made"].index):
        some = [row for row in found if row["state"] == state]
        lines += [f"## {state[0].upper()}{state[1:]} ({len(some)})", ""]
        lines += ["| type | log-probs | gradients | equal bits | remark |", "|---|---|---|---|---|"]
        for row in some:
            numbers = ["" if row[k] is None else f"{row[k]:.1e}" for k in ("logprob", "gradient")]
            lines.append(f"| `{row['type']}` | {' | '.join(numbers)} | {row['bits']} | {row['remark']} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    asked = [a for a in sys.argv[1:] if not a.startswith("--")]
    if asked:
        for name in asked:
            signal.alarm(SECONDS)  # ends the process, which `rows` notices
            row = measured(name)
            print(json.dumps(row) if "--json" in sys.argv else f"{name}: {row}", flush=True)
    else:
        found = rows(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
        if wrong := [row for row in found if row["state"] in ("WRONG", "FAILS")]:
            sys.exit("\n".join(f"{row['type']}: {row}" for row in wrong))
        PAGE.write_text(page(found))
