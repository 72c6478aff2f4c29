"""What drafts gain in decoding on H100 and H200, by a model; nothing here was measured.

``python -m rolltree.bench.modelled_drafts`` writes bench/results/model-sm_90/drafts.md: Qwen3-8B in bf16, rows in
groups of 8 that share all of their context but the last 512 tokens. A step of R rows with k drafted tokens each has
R (1 + k) queries. It takes as long as the larger of

- its bytes at `STREAM_SHARE` of the memory's rate: the weights once, keys and values of what is shared once a group,
  of what is not once a row;
- its FLOP at `GEMM_SHARE` of the peak: 2 a weight and query, 4 D a head, layer, key and query;

and `HOST` seconds, which drafting and planning a step take with few rows. A drafted token is right with probability p,
and the first wrong one ends what a row gains: (1 - p^(k+1)) / (1 - p) tokens a step. k is the best of 0 to 32.
"""

from __future__ import annotations

from .modelled import FOLDER, GEMM_SHARE, MEMORY, PEAK, STREAM_SHARE

LAYERS, HEADS, KEY_HEADS, DIM = 36, 32, 8, 128
WEIGHTS = 8.19e9
GROUP, OWN = 8, 512
HOST = 150e-6  # an assumption: what the host needs for a step that no replay hides
MOST = 32
ROWS, CONTEXTS, RIGHT = (1, 8, 64, 256), (4096, 32768), (0.5, 0.7, 0.9)


def step_seconds(rows: int, context: int, drafted: int, memory: float) -> float:
    """A step in which each of ``rows`` rows brings ``drafted`` drafted tokens; ``memory`` in bytes/s."""
    groups, queries = -(-rows // GROUP), rows * (1 + drafted)
    keys = groups * (context - OWN) + rows * OWN
    size = 2 * WEIGHTS + keys * 2 * 2 * KEY_HEADS * DIM * LAYERS
    flop = queries * (2 * WEIGHTS + 4 * DIM * HEADS * LAYERS * context)
    return max(size / (STREAM_SHARE * memory), flop / (GEMM_SHARE * PEAK)) + HOST


def tokens_a_step(drafted: int, right: float) -> float:
    """What a row gains, its own sampled token among it."""
    return float(sum(right**i for i in range(drafted + 1)))


def best(rows: int, context: int, right: float, memory: float) -> tuple[int, float, float]:
    """How much to draft, tokens a step of a row, and tokens a second over those without drafts."""
    plain = step_seconds(rows, context, 0, memory)

    def speed(drafted: int) -> float:
        return tokens_a_step(drafted, right) * plain / step_seconds(rows, context, drafted, memory)

    drafted = max(range(MOST + 1), key=speed)
    return drafted, tokens_a_step(drafted, right), speed(drafted)


def table() -> str:
    lines = [
        "# Drafts, predicted by a model, not measured",
        "",
        "`bench/modelled_drafts.py` says from what: Qwen3-8B in bf16, groups of 8 that share all but 512 tokens. In a",
        "cell: tokens drafted for a row, tokens it gains a step, and tokens a second as a multiple of those without.",
        "",
        "| GPU | rows | context | step without | " + " | ".join(f"right {p:.0%}" for p in RIGHT) + " |",
        "|---|---|---|---|" + "---|" * len(RIGHT),
    ]
    for gpu, memory in MEMORY.items():
        for context in CONTEXTS:
            for rows in ROWS:
                found = (best(rows, context, right, memory) for right in RIGHT)
                cells = " | ".join(f"{k}, {tokens:.1f}, {gain:.2f} x" for k, tokens, gain in found)
                plain = 1e3 * step_seconds(rows, context, 0, memory)
                lines.append(f"| {gpu} | {rows} | {context} | {plain:.1f} ms | {cells} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / "drafts.md").write_text(table())
