"""The ops at sizes of real models, on a GPU: each backend against float64 or the reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rolltree.kernels import (
    Objective,
    PolicyFields,
    linear_logprob,
    linear_policy_loss,
    logprob_from_logits,
    plan_policy_loss,
    policy_loss,
    sample_tokens,
    tree_attention,
    tree_decode_attention,
    use_backend,
)
from rolltree.kernels.tree_decode import DecodePlan

from ..kernels.test_layer_ops import OPS, both, inputs
from ..support.trees import ancestors_mask, random_trees

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def relative(found: Tensor, exact: Tensor) -> float:
    found, exact = found.detach().double(), exact.detach().double()
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("vocab", [50257, 151669])
def test_linear_logprob(vocab: int) -> None:
    """Errors of value and gradients at most twice those of plain bf16 PyTorch."""
    generator = torch.Generator(CUDA).manual_seed(0)
    rows, width = 1027, 512
    hidden = torch.randn(rows, width, generator=generator, device=CUDA).bfloat16()
    weight = (torch.randn(vocab, width, generator=generator, device=CUDA) / 16).bfloat16()
    target = torch.randint(vocab, (rows,), generator=generator, device=CUDA)
    upstream = torch.randn(rows, generator=generator, device=CUDA)

    def gradients(value: Tensor, inputs: list[Tensor]) -> list[Tensor]:
        return [value, *torch.autograd.grad(value, inputs, upstream.to(value.dtype))]

    def plain(dtype: torch.dtype) -> list[Tensor]:
        inputs = [hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()]
        logprob = (inputs[0] @ inputs[1].T).log_softmax(-1).gather(1, target[:, None])[:, 0]
        return gradients(logprob, inputs)

    inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    found = gradients(linear_logprob(*inputs, target).logprob, inputs)
    for ours, theirs, exact in zip(found, plain(torch.bfloat16), plain(torch.float64), strict=True):
        assert relative(ours, exact) <= 2 * relative(theirs, exact)


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_logprob_from_logits(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-prob, entropy and gradient of bf16 logits: as near to fp64 as fp32 arithmetic on them."""
    monkeypatch.setenv("ROLLTREE_BACKEND", backend)  # autograd's own threads see it too
    generator = torch.Generator(CUDA).manual_seed(0)
    logits = (3 * torch.randn(517, 50257, generator=generator, device=CUDA)).bfloat16()
    target = torch.randint(50257, (517,), generator=generator, device=CUDA)
    upstream = torch.randn(2, 517, generator=generator, device=CUDA)

    def plain(dtype: torch.dtype) -> list[Tensor]:
        x = logits.to(dtype).requires_grad_()
        logp = x.log_softmax(-1)
        scored = logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(-1)
        return [*scored, torch.autograd.grad(scored, x, tuple(upstream.to(dtype)))[0]]

    x = logits.clone().requires_grad_()
    out = logprob_from_logits(x, target, want=("entropy",))
    assert out.entropy is not None
    found = [out.logprob, out.entropy, torch.autograd.grad((out.logprob, out.entropy), x, tuple(upstream))[0]]
    for ours, theirs, exact in zip(found, plain(torch.float32), plain(torch.float64), strict=True):
        assert relative(ours, exact) <= 2 * relative(theirs.to(ours.dtype), exact) + 1e-6


def test_policy_loss() -> None:
    generator = torch.Generator(CUDA).manual_seed(0)
    tokens = 1 << 20
    logprob = -torch.rand(tokens, generator=generator, device=CUDA) * 3
    old = logprob + 0.3 * torch.randn(tokens, generator=generator, device=CUDA)
    advantage = torch.randn(tokens, generator=generator, device=CUDA)

    def gradient(backend: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x = logprob.to(dtype).requires_grad_()
        fields = PolicyFields.flat(advantage.to(dtype), old_logprob=old.to(dtype))
        with use_backend(backend):  # type: ignore[arg-type]
            loss = policy_loss(x, fields, Objective(), normalizer=tokens).loss
        return loss, torch.autograd.grad(loss, x)[0]

    loss, slope = gradient("triton", torch.float32)
    exact_loss, exact_slope = gradient("reference", torch.float64)
    torch.testing.assert_close(loss.double(), exact_loss.double(), rtol=1e-5, atol=1e-7)
    assert relative(slope, exact_slope) < 1e-5


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("rms_norm", (2051, 4096)),
        ("rms_norm", (40001, 128)),
        ("rotate", (1, 32, 8, 2049, 128)),
        ("silu_mul", (1027, 14336)),
    ],
)
def test_layer_ops(name: str, shape: tuple[int, ...]) -> None:
    """Errors of values and gradients at most twice those of plain bf16 PyTorch."""
    op = OPS[name]
    given, upstream = ([t.to(CUDA) for t in some] for some in inputs(op, shape, torch.bfloat16))
    exact = both(op.plain, op, [t.double() for t in given], [t.double() for t in upstream])
    found = both(op.run, op, given, upstream)
    for ours, theirs, known in zip(found, both(op.plain, op, given, upstream), exact, strict=True):
        assert relative(ours, known) <= 2 * relative(theirs, known)


# Trees of a hundred tokens are masked in every tile; of long ones some tiles are wholly visible, and roots have more
# rows than one program of dK/dV takes.
SHORT, LONG = {"restart": 0.01, "close": 0.05}, {"restart": 0.001, "close": 0.005}
ATTENTION = [
    (3001, (16, 8), 128, SHORT),
    (3001, (16, 8), 128, LONG),
    (1500, (8, 2), 64, LONG),
    (2001, (8, 2), 256, LONG),
]


@pytest.mark.parametrize(("tokens", "heads", "dim", "kind"), ATTENTION)
def test_tree_attention(tokens: int, heads: tuple[int, int], dim: int, kind: dict[str, float]) -> None:
    end, _, parents = random_trees(tokens, seed=1, **kind)
    generator = torch.Generator(CUDA).manual_seed(0)
    shapes = [(tokens, heads[0], dim), (tokens, heads[1], dim), (tokens, heads[1], dim)]
    inputs = [torch.randn(shape, generator=generator, device=CUDA).bfloat16() for shape in shapes]
    upstream = torch.randn(shapes[0], generator=generator, device=CUDA).bfloat16()
    mask = ancestors_mask(parents).to(CUDA)

    def plain(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in inputs]
        q, k, v = (x.transpose(0, 1) for x in leaves)
        k, v = (x.repeat_interleave(heads[0] // heads[1], 0) for x in (k, v))
        scores = (q @ k.transpose(1, 2) * dim**-0.5).masked_fill(~mask, -torch.inf)
        out = (scores.softmax(-1) @ v).transpose(0, 1)
        return [out, *torch.autograd.grad(out, leaves, upstream.to(dtype))]

    leaves = [x.clone().requires_grad_() for x in inputs]
    out = tree_attention(*leaves, end.to(CUDA))
    found = [out, *torch.autograd.grad(out, leaves, upstream)]
    for ours, theirs, exact in zip(found, plain(torch.bfloat16), plain(torch.float64), strict=True):
        assert relative(ours, exact) <= 2 * relative(theirs, exact)


FLAT: list[dict[str, float]] = [{"top_k": 3000}, {"top_k": 3000, "top_p": 0.9}, {"top_p": 0.99}, {"min_p": 1e-4}]


@pytest.mark.parametrize("filters", [{}, {"top_k": 50, "top_p": 0.95}, {"min_p": 0.05}, *FLAT])
def test_sample_tokens(filters: dict[str, float]) -> None:
    """The GPU draws the very tokens that the definition draws on the CPU, where few are kept, all of them, or many."""
    rows, vocab = 64, 151669
    logits = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(0))
    seed = torch.arange(rows)
    with use_backend("reference"):
        expected = sample_tokens(logits, temperature=0.9, seed=seed, step=seed * 7, **filters)  # type: ignore[arg-type]
    on_gpu = seed.to(CUDA)
    found = sample_tokens(logits.to(CUDA), temperature=0.9, seed=on_gpu, step=on_gpu * 7, **filters)  # type: ignore[arg-type]
    assert torch.equal(found.token.cpu(), expected.token)
    order = logits.argsort(descending=True, stable=True)
    last = [order.eq(x.last_kept.cpu()[:, None]).int().argmax(-1) for x in (found, expected)]
    # A token weighs a millionth of a wide nucleus: sums in float32 may tell its end by one token differently
    assert (last[0] - last[1]).abs().max() <= ("top_p" in filters and filters in FLAT)
    for name in ("logprob", "raw_logprob", "entropy"):
        torch.testing.assert_close(getattr(found, name).cpu(), getattr(expected, name), rtol=1e-5, atol=1e-5)


def test_sampling_waits_for_nothing() -> None:
    """No call of a decode step's draw makes the host wait for the device."""
    logits = torch.randn(16, 4099, device=CUDA)
    seed = torch.arange(16, device=CUDA)
    sample_tokens(logits, temperature=1.0, top_p=0.9, seed=seed, step=seed)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        sample_tokens(logits, temperature=1.0, top_p=0.9, seed=seed, step=seed)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def head_inputs(rows: int, width: int, vocab: int) -> tuple[Tensor, Tensor, Tensor, PolicyFields]:
    generator = torch.Generator(CUDA).manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, device=CUDA).bfloat16().requires_grad_()
    weight = (torch.randn(vocab, width, generator=generator, device=CUDA) / 16).bfloat16().requires_grad_()
    target = torch.randint(vocab, (rows,), generator=generator, device=CUDA)
    old = linear_logprob(hidden.detach(), weight.detach(), target).logprob
    noise, advantage = torch.randn(2, rows, generator=generator, device=CUDA)
    mask = torch.rand(rows, generator=generator, device=CUDA) < 0.6
    return hidden, weight, target, PolicyFields.flat(advantage, old_logprob=old + 0.2 * noise, mask=mask)


def test_linear_policy_loss_equals_the_two_ops() -> None:
    hidden, weight, target, fields = head_inputs(3001, 512, 50257)
    objective = Objective.preset("dapo")
    one = linear_policy_loss(hidden, weight, target, fields, objective, normalizer=1000.0).loss
    two = policy_loss(linear_logprob(hidden, weight, target).logprob, fields, objective, normalizer=1000.0).loss
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)
    for got, want in zip(*(torch.autograd.grad(loss, (hidden, weight)) for loss in (one, two)), strict=True):
        assert relative(got, want) < 1e-2


def test_a_planned_loss_waits_for_nothing_and_goes_into_a_graph() -> None:
    hidden, weight, target, fields = head_inputs(2048, 256, 32000)
    objective = Objective.preset("dapo")
    plan = plan_policy_loss(fields, objective, num_rows=2048, vocabulary=32000, hidden_size=256, device=CUDA)
    normalizer = torch.tensor(1000.0, device=CUDA)

    def step() -> tuple[Tensor, ...]:
        loss = linear_policy_loss(hidden, weight, target, fields, objective, normalizer=normalizer, plan=plan).loss
        return loss.detach(), *torch.autograd.grad(loss, (hidden, weight))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            expected = step()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for got, want in zip(captured, expected, strict=True):
        assert got.equal(want)


def test_an_accumulator_is_added_to_in_the_forward_and_nothing_waits() -> None:
    hidden, weight, target, fields = head_inputs(2048, 256, 32003)
    objective = Objective.preset("dapo")
    plan = plan_policy_loss(fields, objective, num_rows=2048, vocabulary=32003, hidden_size=256, device=CUDA)
    given = hidden, weight, target, fields, objective
    want = torch.autograd.grad(linear_policy_loss(*given, normalizer=1000.0, plan=plan).loss, (hidden, weight))
    into = torch.zeros(weight.shape, device=CUDA)
    normalizer = torch.tensor(1000.0, device=CUDA)

    def step() -> Tensor:
        loss = linear_policy_loss(*given, normalizer=normalizer, plan=plan, weight_grad=into, in_forward=True).loss
        return torch.autograd.grad(loss, hidden)[0]

    d_hidden = step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert relative(d_hidden, want[0]) < 1e-2
    assert relative(into / 2, want[1]) < 1e-2


def _packed(tokens: int, heads: tuple[int, int], dim: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    end, _, _ = random_trees(tokens, seed, close=0.01, restart=0.002)
    generator = torch.Generator(CUDA).manual_seed(seed)
    q, k, v = (
        torch.randn(tokens, count, dim, generator=generator, device=CUDA).bfloat16().requires_grad_()
        for count in (heads[0], heads[1], heads[1])
    )
    return q, k, v, end.to(CUDA)


def test_tree_attention_in_pieces() -> None:
    """Each piece given the keys of earlier ones that it sees: as near to fp64 as the whole."""
    q, k, v, end = _packed(3000, (8, 2), 128)
    upstream = torch.randn_like(q)

    def gradients(out: Tensor) -> list[Tensor]:
        return [out, *torch.autograd.grad(out, (q, k, v), upstream)]

    outs = []
    for a, b in ((0, 1100), (1100, 1101), (1101, 3000)):
        seen = (end[:a] > a).nonzero().flatten()
        keys = torch.cat([seen, torch.arange(a, b, device=CUDA)])
        ends = (end[keys] - (a - len(seen))).int()
        outs.append(tree_attention(q[a:b], k[a:b], v[a:b], ends, prefix_kv=(k[seen], v[seen])))
    pieces, whole = gradients(torch.cat(outs)), gradients(tree_attention(q, k, v, end))
    with use_backend("reference"):
        exact = gradients(tree_attention(q.double(), k.double(), v.double(), end).to(q.dtype))
    for piece, at_once, truth in zip(pieces, whole, exact, strict=True):
        # the gradients that pieces give their prefix are rounded to bf16 before they are added
        assert relative(piece, truth) <= 2 * relative(at_once, truth) + 2**-9


def test_tree_attention_does_not_recompile() -> None:
    """Fifty sizes, compiled kernels counted before and after."""
    from rolltree.kernels.tree_attention import triton, visible

    kernels = (
        triton.forward_kernel,
        triton.dq_kernel,
        triton.dkdv_kernel,
        triton.add_kernel,
        visible.list_blocks_kernel,
    )

    def compiled() -> int:
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    counts = []
    for seed in range(50):
        q, k, v, end = _packed(200 + 37 * seed, (4, 2), 64, seed)
        torch.autograd.grad(tree_attention(q, k, v, end).sum(), (q, k, v))
        counts.append(compiled())
    assert counts[0] > 0
    assert counts[-1] == counts[0]


def test_tree_attention_waits_for_nothing() -> None:
    q, k, v, end = _packed(2000, (8, 2), 128)
    torch.autograd.grad(tree_attention(q, k, v, end).sum(), (q, k, v))  # compiled now
    fresh = end.clone()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(tree_attention(q, k, v, fresh).sum(), (q, k, v))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_plain_sequences_by_the_varlen_kernel() -> None:
    """Such a batch goes to the varlen kernel instead of tree attention, also with a window."""
    from rolltree.engine.model import varlen

    attend = varlen.kernel()
    if attend is None:
        pytest.skip("neither flash-attn nor torch's varlen attention is there")
    lengths = torch.tensor([700, 1, 333, 1024], device=CUDA)
    cu = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int()
    q, k, v, _ = _packed(int(cu[-1]), (8, 2), 128)
    end = torch.repeat_interleave(cu[1:], lengths)
    position = torch.arange(len(q), device=CUDA) - torch.repeat_interleave(cu[:-1], lengths)
    for window in (None, 100):
        plain = attend(q, k, v, cu, 1024, None, window)
        tree = tree_attention(q, k, v, end, position=position, window=window)
        assert relative(plain, tree) < 1e-2


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tree_decode(dim: int) -> None:
    """Prompts shared by 16 rows each, against fp64 by the reference and no further from it than twice plain bf16."""
    groups, rows, prompt, tail, page = 4, 16, 1500, 70, 16
    pages_of = lambda length: -(-length // page)  # noqa: E731
    lengths, begin, end, position = [], [], [], []
    for g in range(groups):
        lengths += [prompt] + [tail] * rows
        begin += [g * rows, *range(g * rows, (g + 1) * rows)]
        end += [(g + 1) * rows, *range(g * rows + 1, (g + 1) * rows + 1)]
        position += [0] + [prompt] * rows
    counts = torch.tensor([pages_of(n) for n in lengths])
    indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    total = int(indptr[-1])
    order = torch.randperm(total, generator=torch.Generator().manual_seed(0))
    plan = DecodePlan(
        *(
            torch.as_tensor(values).int().to(CUDA)
            for values in (indptr, order, [0] * len(lengths), lengths, position, begin, end)
        ),
        torch.full((groups * rows,), prompt + tail - 1, dtype=torch.int32, device=CUDA),
    )
    generator = torch.Generator(CUDA).manual_seed(0)
    q = torch.randn(groups * rows, 8, dim, generator=generator, device=CUDA).bfloat16()
    k, v = torch.randn(2, total, page, 2, dim, generator=generator, device=CUDA).bfloat16()
    found, lse = tree_decode_attention(q, k, v, plan)
    exact, exact_lse = tree_decode_attention(q.double(), k.double(), v.double(), plan)
    with use_backend("reference"):
        plain, _ = tree_decode_attention(q, k, v, plan)
    assert relative(found, exact) <= 2 * relative(plain, exact)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-3, atol=1e-3)
