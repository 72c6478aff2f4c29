"""The policy's LoRA adapter in vLLM, which computes with A and B themselves: in bf16 an update that is small against a
weight would be lost in the sum W + s B A."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from safetensors.torch import save_file
from torch import Tensor
from vllm import LLM
from vllm.config.lora import MaxLoRARanks
from vllm.lora.request import LoRARequest

from ...errors import UserError
from ...model.lora import FILE, NAME, PREFIX

SIDE = ".lora_"
"""The part of a name that tells the adapter's tensors from the others."""


class Adapter:
    """Files from which vLLM loads the adapter after each update.

    Args:
        rank: rows of A.
        scale: the factor s of B A.

    Raises:
        UserError: vLLM has no room for adapters of this rank.
    """

    def __init__(self, rank: int, scale: float) -> None:
        rooms = sorted(get_args(MaxLoRARanks))
        if rank > rooms[-1]:
            raise UserError(
                f"model.lora.rank is {rank}, and vLLM takes adapters up to rank {rooms[-1]}; lower it, or set "
                "rollout.vllm_options.enable_lora = false, which sends merged weights."
            )
        self.rank, self.scale = rank, scale
        self.engine_args: dict[str, Any] = {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": next(room for room in rooms if room >= rank),
        }
        self.request: LoRARequest | None = None
        """The argument of vLLM's requests; None before the first update, when B is zero."""
        self._directory = tempfile.TemporaryDirectory(prefix="rolltree-adapter-")

    def load(self, llm: LLM, tensors: Mapping[str, Tensor]) -> None:
        """Let vLLM compute with new tensors, given by their names in the trained model."""
        directory = Path(self._directory.name)
        files = {
            f"{PREFIX}{name.replace(f'.{NAME}.', '.')}": tensor.detach().cpu().contiguous()
            for name, tensor in tensors.items()
        }
        save_file(files, directory / FILE, metadata={"format": "pt"})
        config = {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.scale * self.rank,
            "target_modules": sorted({name.partition(SIDE)[0].rpartition(".")[2] for name in tensors}),
            "bias": "none",
        }
        (directory / "adapter_config.json").write_text(json.dumps(config))
        self.request = LoRARequest("policy", 1, str(directory), load_inplace=True)
        llm.llm_engine.add_lora(self.request)
        self.request = LoRARequest("policy", 1, str(directory))  # requests use what is loaded
