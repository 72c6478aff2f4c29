"""``rolltree plan``: memory and seconds by formulas of their own, rates read back from metrics, and all refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rolltree.engine.app.cli import main
from rolltree.engine.app.config import load_config
from rolltree.engine.app.plan import make_plan
from rolltree.engine.plan.modelled import MFU, PEAK
from rolltree.engine.plan.rates import NETWORK, TO_STORE, UPDATE, broadcast_s

from ...support.tiny import write_job

LAYERS, HEADS, KEY_HEADS, DIM, HIDDEN, INNER, VOCABULARY = 4, 8, 2, 16, 64, 96, 300
QWEN = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KEY_HEADS, "head_dim": DIM,
    "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "tie_word_embeddings": False,
}  # fmt: skip
ATTENTION = 2 * HIDDEN * HEADS * DIM + 2 * HIDDEN * KEY_HEADS * DIM + 2 * DIM
PARAMETERS = 2 * VOCABULARY * HIDDEN + HIDDEN + LAYERS * (ATTENTION + 3 * HIDDEN * INNER + 2 * HIDDEN)
KEY_BYTES = 2 * 2 * LAYERS * KEY_HEADS * DIM


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("plan")
    write_job(directory)
    (directory / "shape").mkdir()
    (directory / "shape" / "config.json").write_text(json.dumps(QWEN))
    return directory


def arguments(home: Path, *more: str) -> list[str]:
    return [
        str(home / "tiny.toml"), f"--model.path={home}/shape", "--model.dtype=bfloat16", "--rollout.max_new_tokens=256",
        "--rollout.program=flat", "--rollout.program_options={}", "--trainer.prompts_per_step=8",
        "--trainer.max_tokens=8192", *more,
    ]  # fmt: skip


def plan_of(home: Path, gpus: int, *more: str, **given: Any) -> Any:
    config, *overrides = arguments(home, *more)
    return make_plan(load_config(config, overrides), gpus, **given)


def test_memory_is_that_of_shards_weights_and_keys(home: Path) -> None:
    """Two bytes a weight and gradient, eight of moments, eight of fp32 weights and sums; the last three are sharded."""
    plan = plan_of(home, 4, "--rollout.kv_tokens=100000", "--roles.reference={}")
    assert [(layout.ranks, layout.engines) for layout in plan.layouts] == [(1, 3), (2, 2), (3, 1)]
    for layout in plan.layouts:
        assert layout.trainer_gb * 1e9 == pytest.approx((20 * PARAMETERS + 2 * PARAMETERS) / layout.ranks)
        assert layout.engine_gb * 1e9 == pytest.approx(2 * PARAMETERS + 100000 * KEY_BYTES)
        assert layout.fits is True
    (alone,) = plan_of(home, 1).layouts
    assert alone.trainer_gb * 1e9 == pytest.approx(20 * PARAMETERS + 4096 * KEY_BYTES)


def test_a_layout_that_does_not_fit_is_marked_and_never_the_best(home: Path) -> None:
    needed = math.ceil(80e9 / KEY_BYTES)
    plan = plan_of(home, 2, f"--rollout.kv_tokens={needed}")
    assert [layout.fits for layout in plan.layouts] == [False]
    assert "does not fit" in "\n".join(plan.lines())
    assert "most tokens/s" not in "\n".join(plan.lines())
    assert plan_of(home, 2, f"--rollout.kv_tokens={needed}", device="H200").layouts[0].fits


def test_an_update_is_three_forward_passes_at_the_assumed_utilisation(home: Path) -> None:
    """The count is for S = 0 and the lengths that were drawn; a reference adds a third."""
    plan = plan_of(home, 2)
    (layout,) = plan.layouts
    mean = layout.outcome.tokens_s * layout.outcome.step_s  # response tokens of a step
    linear = 3 * 2 * PARAMETERS * (8 * 64 + mean) / (MFU * PEAK)
    assert linear < layout.outcome.update_s < 1.5 * linear  # attention is the rest
    (with_reference,) = plan_of(home, 2, "--roles.reference={}").layouts
    assert with_reference.outcome.update_s == pytest.approx(layout.outcome.update_s * 4 / 3)
    (twice,) = plan_of(home, 2, "--roles.reference={}", "--trainer.epochs=2").layouts
    assert twice.outcome.update_s == pytest.approx(layout.outcome.update_s * 7 / 3)  # the reference scores once
    two = plan_of(home, 4).layouts[1]
    assert two.outcome.update_s == pytest.approx(layout.outcome.update_s / 2, rel=0.05)


def test_weights_go_from_node_to_node() -> None:
    assert broadcast_s(NETWORK, 8, 1) == 1.0
    assert broadcast_s(NETWORK, 9, 8) == 2.0
    assert broadcast_s(NETWORK, 8 * 7, 1) == 3.0
    assert broadcast_s(NETWORK, 8 * 7, 8 * 7) == 1.0  # each node of ranks sends its part
    assert broadcast_s(NETWORK, 8 * 7, 8 * 2) == 3.0
    assert broadcast_s(NETWORK, 8 * 6, 8 * 2) == 2.0
    assert TO_STORE < NETWORK


def test_lag_and_waits_follow_the_staleness(home: Path) -> None:
    zero, stale = (plan_of(home, 2, f"--loop.staleness={s}").layouts[0].outcome for s in (0, 2))
    assert (zero.lag, zero.max_lag) == (0, 0)
    assert 0 < stale.max_lag <= 2
    assert stale.step_s < zero.step_s
    assert stale.trainer_waits < zero.trainer_waits


def test_many_gpus_are_split_in_at_most_seven_ways_and_no_rank_is_without_trees(home: Path) -> None:
    plan = plan_of(home, 16, "--trainer.prompts_per_step=6")
    assert [layout.ranks for layout in plan.layouts] == [2, 4, 6]
    assert all(layout.ranks + layout.engines == 16 for layout in plan.layouts)


def test_the_command_prints_a_table_or_json_and_says_that_it_is_simulated(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments(home, "--gpus", "3")]) == 0
    table = capsys.readouterr().out
    assert table.startswith("Simulated, not measured: the arithmetic of an H100 by its data sheet; nothing was run on")
    assert "(colocated) are not modelled." in table
    assert table.count("most tokens/s") == 1
    assert main(["plan", *arguments(home, "--gpus", "3", "--json")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["simulated"] is True
    assert [layout["ranks"] for layout in told["layouts"]] == [1, 2]
    for layout in told["layouts"]:
        assert f"{layout['tokens_s']:,.0f}" in table


# -- rates of a run ---------------------------------------------------------------------------------------------------

STEP_S, ROWS, TOKEN_S, SYNC_S = 0.05, 40, 0.001, 0.3
LENGTH, PROMPT, GROUP, GROUPS = 100, 20, 5, 4


def write_measured(directory: Path, slower: float = 1.0, **changed: Any) -> Path:
    """Write what a run would that decodes 20 responses of 100 tokens by steps of 40 rows, 0.05 s each, and updates on
    2 ranks for 1 ms a token and rank."""
    (directory / "rollouts").mkdir(parents=True)
    sampling, share = LENGTH * STEP_S * slower, GROUPS * GROUP / ROWS
    update = TOKEN_S * GROUPS * GROUP * (PROMPT + LENGTH) / 2
    row: dict[str, Any] = {f"timing_s/{part}": update / len(UPDATE) for part in UPDATE}
    row |= {
        "perf/sampling_s": sampling + 0.7, "perf/idle/tools": 0.7, "perf/idle/tail": sampling * (1 - share),
        "rollout/sampled_tokens": GROUPS * GROUP * LENGTH, "timing_s/step": 10.0, "timing_s/sync": SYNC_S,
        "perf/throughput": GROUPS * GROUP * (PROMPT + LENGTH) / 10.0, "timing_s/reward": 0.4,
    } | changed  # fmt: skip
    lines = [json.dumps({"step": step} | (row if step else {})) for step in range(4)]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "config.toml").write_text(
        f"[rollout]\nn = {GROUP}\nmax_batch_rows = {ROWS}\n[trainer]\nprompts_per_step = {GROUPS}\nranks = 2\n"
        "[reward]\nworkers = 1\n"
    )
    columns = {
        "group": [i // GROUP for i in range(GROUPS * GROUP)],
        "prompt_ids": [[1] * PROMPT] * GROUPS * GROUP,
        "response_ids": [[2] * LENGTH] * GROUPS * GROUP,
    }
    pq.write_table(pa.table(columns), directory / "rollouts" / "step_000001.parquet")
    return directory


LIKE_IT = [f"--rollout.n={GROUP}", f"--trainer.prompts_per_step={GROUPS}", f"--rollout.max_batch_rows={ROWS}"]


def test_a_run_that_is_planned_by_its_own_rates_takes_its_own_time(home: Path, tmp_path: Path) -> None:
    run = write_measured(tmp_path / "run")
    (alone,) = plan_of(home, 1, *LIKE_IT, "--model.dtype=float32", run=run).layouts
    update = TOKEN_S * GROUPS * GROUP * (PROMPT + LENGTH)
    judging = 0.4  # of all responses; a step of decoding and a look of the driver come on top
    assert alone.outcome.step_s == pytest.approx(LENGTH * STEP_S + update + judging, abs=2 * STEP_S + 0.02)
    assert alone.outcome.update_s == pytest.approx(update)
    assert alone.fits is None
    (thrice,) = plan_of(home, 1, *LIKE_IT, "--trainer.epochs=3", run=run).layouts
    assert thrice.outcome.update_s == pytest.approx(3 * update)
    split = plan_of(home, 3, *LIKE_IT, run=run).layouts[1]
    assert split.outcome.update_s == pytest.approx(update / 2)
    assert split.outcome.step_s == pytest.approx(LENGTH * STEP_S + update / 2 + judging + SYNC_S, abs=2 * STEP_S + 0.02)


def test_a_doubled_rate_shows(home: Path, tmp_path: Path) -> None:
    """The negative: metrics of a sampler that takes twice as long."""
    one, two = (
        plan_of(home, 1, *LIKE_IT, run=write_measured(tmp_path / f"{slower}", slower)).layouts[0].outcome.step_s
        for slower in (1.0, 2.0)
    )
    assert two - one == pytest.approx(LENGTH * STEP_S, abs=2 * STEP_S)


def test_the_table_names_the_run(home: Path, tmp_path: Path) -> None:
    run = write_measured(tmp_path / "run")
    lines = list(plan_of(home, 2, *LIKE_IT, run=run).lines())
    assert (
        lines[0]
        == f"Simulated, not measured: rates that the run '{run}' measured in 3 steps, for devices like its own."
    )
    assert "A decode step takes 50 ms whatever its rows, an update 1e+03 us a token" in lines[1]


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--gpus", "2", "--model.dtype=float32"], "The hardware model is of bfloat16, and model.dtype is 'float32'"),
        (["--gpus", "2", "--model.path=none"], "needs config.json of the model, which 'none' (model.path) lacks"),
        (["--gpus", "1", "--loop.staleness=1"], "One GPU that samples while it trains is not modelled"),
        (
            ["--gpus", "2", "--rollout.max_new_tokens=5000", "--rollout.kv_tokens=9999"],
            "is longer than the model's 4096 positions",
        ),
        (
            ["--gpus", "2", "--rollout.backend=vllm", "--rollout.vllm_options={gpu_memory_utilization=1e-6}"],
            "no response",
        ),
        (["--gpus", "2", "--rates", "nowhere"], "'nowhere' has no metrics.jsonl"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    more: list[str], said: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *arguments(home, *more)]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"perf/idle/tail": None}, "Step 1 of '{}/metrics.jsonl' lacks perf/idle/tail"),
        ({"rollout/sampled_tokens": 0}, "'{}/metrics.jsonl' has no decode steps"),
        ("metrics.jsonl", "'{}/metrics.jsonl' is not a run's metrics"),
        ("config.toml", "'{}/config.toml' lacks 'rollout'"),
        ("rollouts/step_000001.parquet", "'{}' has no rollouts/step_*.parquet"),
    ],
)
def test_what_a_run_lacks_is_named(damage: Any, said: str, home: Path, tmp_path: Path, capsys: Any) -> None:
    run = write_measured(tmp_path / "run", **(damage if isinstance(damage, dict) else {}))
    if isinstance(damage, str):
        (run / damage).unlink() if "parquet" in damage else (run / damage).write_text("1\n" if "json" in damage else "")
    assert main(["plan", *arguments(home, "--gpus", "2", "--rates", str(run))]) == 2
    assert said.format(run) in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}, "has a mixture of experts"),
        ({"layer_types": ["linear_attention"] + ["full_attention"] * 3, "model_type": "qwen3_next"}, "has "),
    ],
)
def test_models_that_the_arithmetic_does_not_know_are_refused(
    changed: dict[str, Any], said: str, home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
    (tmp_path / "config.json").write_text(json.dumps(QWEN | small | changed))
    assert main(["plan", *arguments(home, f"--model.path={tmp_path}", "--gpus", "2")]) == 2
    error = capsys.readouterr().err
    assert "The hardware model knows plain dense decoders" in error
    assert said in error
