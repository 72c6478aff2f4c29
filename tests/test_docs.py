"""Every Python block of README.md and docs/ runs, page by page, on tiny stand-ins for what a reader has."""

from __future__ import annotations

import ast
import asyncio
import copy
import functools
import importlib
import inspect
import re
import runpy
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from rolltree.engine import SamplingParams
from rolltree.engine.settings import TrainConfig
from rolltree.kernels import Objective

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    return [code for kind, code in BLOCK.findall(page.read_text(encoding="utf-8")) if kind == language]


BESIDE_OTHERS = ROOT / "docs" / "other_trainers.md"
"""Its blocks run in tests/engine/integrations/test_other_trainers.py, each where its trainer can be imported."""
WITH_PYTHON = [page for page in PAGES if blocks(page, "python") and page != BESIDE_OTHERS]


@pytest.fixture
def model() -> Any:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    bytes_alone = Tokenizer(models.BPE({c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytes_alone, eos_token="\n")


def reader(model: Any, tokenizer: Any, directory: Path) -> dict[str, Any]:
    """Provide the names that the pages assume."""
    model.save_pretrained(directory / "model")
    rng = torch.Generator().manual_seed(1)
    prompt, responses = [5, 6, 7], [[8, 9, 10], [8, 9, 11, 12]]
    tokens = {"hidden": torch.randn(12, 32, generator=rng), "weight": torch.randn(300, 32, generator=rng)}
    return {
        "path": directory / "model",
        "input_ids": torch.tensor([[1, 2, 3, 4]]),
        "model": model,
        "tokenizer": tokenizer,
        "prompt": prompt,
        "prompt_ids": prompt,
        "prompts": [prompt, [*prompt, 8, 9]],
        "responses": responses,
        "advantages": [1.0, -1.0],
        "logprobs": [[-1.0, -1.0, -2.0], [-1.0, -1.0, -3.0, -1.0]],
        "masks": [[True] * 3, [True] * 4],
        **{name: values.requires_grad_() for name, values in tokens.items()},
        "target": torch.randint(0, 300, (12,), generator=rng),
        "advantage": torch.randn(2, generator=rng),
        "old_logprob": torch.full((12,), -5.7),
        "mask": torch.ones(12, dtype=torch.bool),
        "cu_seqlens": torch.tensor([0, 5, 12]),
        **{name: torch.randn(6, heads, 32, generator=rng) for name, heads in (("q", 4), ("k", 2), ("v", 2))},
        "params": SamplingParams(n=2, max_new_tokens=4),
        "new_parameters": {name: tensor * 2 for name, tensor in model.state_dict().items()},
        "continuations": [[[8, 9], [8, 10]], []],
        "objective": Objective.preset("grpo"),
        "normalizer": 2.0,
        "ranks": 1,
        "rank": 0,
        "device": "cpu",
        "subtree_end": torch.tensor([6, 6, 4, 4, 6, 6], dtype=torch.int32),
    }


@contextmanager
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def trl_trainer(directory: Path) -> GRPOTrainer:
    arguments = GRPOConfig(
        output_dir=str(directory / "out"), max_steps=1, max_completion_length=4, num_generations=2, report_to=[],
        per_device_train_batch_size=2, use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    data = Dataset.from_dict({"prompt": ["What is 2 + 3?"] * 4})
    return GRPOTrainer(str(directory / "path/to/model"), lambda completions, **_: [0.0, 1.0], arguments, data)


@pytest.mark.slow(but=6)
@pytest.mark.check(but=4)
@pytest.mark.parametrize("page", WITH_PYTHON, ids=lambda page: page.name)
def test_python_blocks_run(
    page: Path, model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = reader(model, tokenizer, tmp_path)
    if page.name == "README.md":
        model.save_pretrained(tmp_path / "path/to/model")
        tokenizer.save_pretrained(tmp_path / "path/to/model")
        given["trainer"] = trl_trainer(tmp_path)
    if page.name == "rollouts.md":
        adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=["q_proj"]))
        adapted.save_pretrained(tmp_path / "path/to/lora")
    monkeypatch.chdir(tmp_path)
    with one_rank() if page.name == "trees.md" else nullcontext():
        for code in blocks(page, "python"):
            compiled = compile(code, f"{page.name}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            found = eval(compiled, given)
            if inspect.iscoroutine(found):
                asyncio.run(found)


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "toml")], ids=lambda page: page.name)
def test_toml_blocks_are_keys_of_a_run(page: Path) -> None:
    needed = {"name": "a", "model": {"path": "m"}, "data": {"tasks": [{"name": "chain_sum"}]}}
    for code in blocks(page, "toml"):
        TrainConfig.model_validate(needed | tomllib.loads(code))


def test_the_page_of_the_configuration_is_what_the_models_say() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "configuration.py"))
    assert page["PAGE"].read_text(encoding="utf-8") == page["reference"](), "run python docs/configuration.py"


def api_lines(module: str) -> list[str]:
    """Return the part of docs/api.py's page for a package."""
    page: str = runpy.run_path(str(ROOT / "docs" / "api.py"))["reference"]()
    return re.split(r"^## .*$", page[page.index(f"## {module}\n") :], flags=re.MULTILINE)[1].splitlines()


@pytest.mark.parametrize("module", ["rolltree.kernels", "rolltree.engine"])
def test_the_page_of_the_api_has_every_public_name(module: str) -> None:
    """Each with a docstring, and tensors in signatures and fields with shapes."""
    public, lines = importlib.import_module(module), api_lines(module)
    in_full = [line.removeprefix("### ") for line in lines if re.fullmatch(r"### \w+", line)]
    in_a_line = dict(row.groups() for line in lines if (row := re.fullmatch(r"\| `(\w+)` \| (.*) \|", line)))
    assert sorted([*in_full, *in_a_line]) == sorted(public.__all__)
    undocumented = [name for name in in_full if not ast.get_docstring(definition(getattr(public, name)))]
    # A dataclass or named tuple without a docstring is given its signature for one.
    undocumented += [name for name, text in in_a_line.items() if not text or text.startswith(f"{name}(")]
    assert undocumented == []
    tensors = [line for line in lines if re.match(r"\s+\w+: Tensor\b", line)]
    assert [line for line in tensors if not re.search(r"# .*(\[|[sS]ee |like )", line)] == []


def definition(value: Any) -> ast.ClassDef | ast.FunctionDef:
    (node,) = ast.parse(inspect.cleandoc("\n" + inspect.getsource(value))).body
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    return node


FOLDERS = ("bench", "csrc", "docs", "engine", "examples", "kernels", "tests")
SOURCE = re.compile(r"[\w./-]+(?:/|\.(?:c|cpp|cu|cuh|h|j2|md|py|svg|toml))")
"""The name of a folder, which ends with a slash, or of a file of sources."""
ELSEWHERE = {"config.toml", "checkpoints/", "export/", "rollouts/", "actor/", "bitwise_parity.md"}
"""Names that documents give to files of a run, to metrics of verl, and to a file of vLLM."""


def names(document: Path) -> list[str]:
    """Return the files and folders that a page names in code, or a picture in its texts; braces stand for several."""
    text = document.read_text(encoding="utf-8")
    if document.suffix == ".svg":
        texts = re.findall(r"<text.*?</text>", text, re.DOTALL)
        words = [word.rstrip(":;,.") for line in texts for word in re.sub(r"<[^>]*>", "", line).split()]
    else:
        words = re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
    return [name for word in words for name in spread(word) if SOURCE.fullmatch(name)]


def spread(word: str) -> list[str]:
    found = re.search(r"\{([^{}]*)\}", word)
    if found is None:
        return [word]
    before, after = word[: found.start()], word[found.end() :]
    return [name for part in found[1].split(",") for name in spread(before + part.strip() + after)]


@functools.cache
def endings() -> frozenset[str]:
    """Return the last parts of the paths of all files and folders."""
    folders = [ROOT / name for name in FOLDERS]
    paths = [*ROOT.glob("*.*"), *folders, *(path for folder in folders for path in folder.rglob("*"))]
    found = set()
    for path in paths:
        parts = path.relative_to(ROOT).parts
        found |= {"/".join(parts[i:]) + "/" * path.is_dir() for i in range(len(parts))}
    return frozenset(found)


@pytest.mark.parametrize(
    "document", [p for p in (*PAGES, *sorted((ROOT / "docs").glob("*.svg"))) if p.name != "CHANGELOG.md"],
    ids=lambda document: document.name,
)  # fmt: skip
def test_files_and_folders_that_a_document_names_are_there(document: Path) -> None:
    """A name may leave out the folders that lead to it."""
    assert [name for name in names(document) if name not in endings() | ELSEWHERE] == []


def test_names_of_files_that_are_gone_are_seen(tmp_path: Path) -> None:
    page, picture = tmp_path / "page.md", tmp_path / "picture.svg"
    page.write_text(
        "`loop/gone.py` and `data/{tree,gone}.py`, `gone/`, `rows.py`, `mine.py:reward`\n```\n`a/b.py`\n```\n"
    )
    picture.write_text('<svg><text x="1"><tspan>loop/gone.py</tspan>, data/: <b>1/2</b></text></svg>')
    assert [n for n in names(page) if n not in endings()] == ["loop/gone.py", "data/gone.py", "gone/"]
    assert names(picture) == ["loop/gone.py", "data/"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_named_files_are_there(page: Path) -> None:
    text = BLOCK.sub("", page.read_text(encoding="utf-8"))
    targets = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert all((page.parent / link).exists() for link in targets)
    named = re.findall(r"`((?:kernels|engine|bench|tests|csrc|examples|docs)/[\w./-]+)`", text)
    assert [path for path in named if not (ROOT / path).exists()] == []
