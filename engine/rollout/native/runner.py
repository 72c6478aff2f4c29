"""Executes a step: the trainer's decoder on the step's rows, the head on the rows that sample, then the sampler."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from rolltree.kernels import kept_tokens
from rolltree.kernels.linear_logprob.head import Head, softcapped
from rolltree.kernels.low_rank import Runs, add_low_rank_

from ...model.attention import Tree, computing, keywords, tree_mask
from ...model.both_ways import Block
from ...model.head import decoder_of, head_reader
from ...model.invariant.install import is_invariant
from ...model.pictures import FAMILIES, both_ways, placeholders, rotary_input
from ...model.routes import Record
from ..failing import NOTHING_LEFT
from .adapters import RowAdapters
from .assembly import Step
from .cache.kv_cache import KvCache
from .cache.states import StateStep
from .compiled import CompiledLayers, DecodeGraphs
from .constraints import Constraints
from .draws import DeviceSamples, Draws, device_samples, draw
from .fused_decoder import FusedDecoder, most_positions
from .pictures import Shown, Towers
from .rows import RowTable, Sampled
from .step_buffer import StepVector

Array = npt.NDArray[Any]
_log = logging.getLogger("rolltree.rollout")


class Runner:
    """Runs the steps of a model.

    Args:
        adapters: those that rows may have.
        compiled: let torch.compile fuse the operations between a layer's matrix products, including the write of new
            keys.
        fused: run the decoder as one call unless it is compiled: on a CPU, and on a GPU in steps that are replayed.
        cuda_graphs: replay steps that only decode; for a CUDA device and a model without recurrent layers, whose routes
            are not recorded.
        window: most steps of a window, see `DecodeGraphs`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: KvCache,
        adapters: RowAdapters,
        *,
        compiled: bool = False,
        fused: bool = False,
        cuda_graphs: bool = False,
        window: int = 1,
    ) -> None:
        self._decoder = decoder_of(model)
        self._head = head_reader(model)
        weight = self._head().weight
        self._device = weight.device
        self._cache = cache
        self._adapters = adapters
        self._invariant = is_invariant(self._decoder)
        self.vocabulary = len(weight)
        self._compiled = compiled
        self._layers = CompiledLayers(self._decoder, cache) if compiled else None
        self._fused: FusedDecoder | None = None
        self._replayed: FusedDecoder | None = None
        if fused and not compiled and self._device.type == "cpu":
            self._fused = FusedDecoder(self._decoder, cache, adapters)
        elif fused and not compiled and self._device.type == "cuda":
            self._replayed = FusedDecoder(self._decoder, cache, adapters, most_positions(model, cache))
        family = FAMILIES.get(getattr(model.config, "model_type", ""))
        self.rotary = family is not None and family.grid
        """Steps need rotary positions besides the depth."""
        self.both_ways = both_ways(model)
        """The layers in which the rows of a picture attend to each other in both directions."""
        self.towers = Towers(model)
        never = placeholders(model)
        self._never = torch.tensor(never, device=self._device) if never else None
        self.graphs: DecodeGraphs | None = None
        if cuda_graphs:
            places = partial(_places, model, cache)
            self.graphs = DecodeGraphs(cache, self.decode_logits, self._device, self._never, window, places)
        self._vector: StepVector | None = None  # of the previous step
        self._draws: Draws | None = None
        self._product: Head | None = None
        self._constraints = Constraints(self.vocabulary, self._device)

    def run(self, step: Step, rows: RowTable, samples: Array, seeds: Array) -> Sampled:
        """Compute a step and return its E samples, or the steps of a window and the samples of each row in order.

        Args:
            rows: table of the branches with their sampling parameters.
            samples: [S] int64, number of samples of each of ``step.sample_rows``.
            seeds: [E] int64, one for each sample.
        """
        adapter = self._adapters.places(step.adapter)
        self._draws = draws = Draws.of(step, rows, samples, seeds, self._draws)
        taken = len(draws.slots)
        every_row = len(step.sample_rows) == len(step.input_ids)
        plain = every_row and step.shown is None
        if self.graphs is not None and self._cache.ready and plain and taken == len(samples):
            vector, logits, drawn = self.graphs.decode(step, draws, adapter)  # pages must exist before a capture
            return self._sampled(step, vector, logits[:taken], drawn, draws, rows)
        least = 2 if self._compiled and self._cache.ready else 1
        vector = StepVector.of(step, draws, self._cache, self._device, adapter, least=least, before=self._vector)
        if step.steps > 1:  # each row is sampled once a step, and nothing else reads the logits
            for _ in range(step.steps):
                logits = self.logits(self._hidden(step, vector), vector.head_runs)
                drawn = vector.advance(draw(logits, vector.draws, draws.filters, self._never))
            self._vector = vector
            return Sampled(*drawn.fetch(taken, step.steps))
        hidden = self._hidden(step, vector)
        if taken == 0:
            self._vector = None  # without a fetch, the copy to the device may still read the vector in the next step
            empty = np.zeros(0, np.float32)
            return Sampled(np.zeros(0, np.int64), empty, empty, empty)
        self._vector = vector
        hidden = hidden if every_row else hidden.index_select(0, vector.view("sample_rows"))
        logits = self.logits(hidden, vector.head_runs)
        if taken > len(samples):
            logits = logits.index_select(0, vector.view("head_row"))
        return self._sampled(step, vector, logits, None, draws, rows)

    def _hidden(self, step: Step, vector: StepVector) -> Tensor:  # [N, H]
        hidden = self._fused.run(vector) if self._fused is not None and step.shown is None else None
        return self._decode(vector, step.states, step.shown) if hidden is None else hidden

    def forget_graphs(self) -> None:
        """Drop captured graphs and the decoders that hold the pages, because weights, adapters or pages have moved."""
        if self.graphs is not None:
            self.graphs.clear()
        for fused in (self._fused, self._replayed):
            if fused is not None:
                fused.let_go_of_pages()

    def forget_moved_graphs(self) -> None:
        """Drop captured graphs if a weight or a page has moved since."""
        if self.graphs is not None:
            self.graphs.forget_moved()

    def _blocks(self, shown: Shown | None) -> tuple[Block, ...]:
        """Return the rows of pictures that attend to each other in both directions, as the cache computes them."""
        if shown is None or self.both_ways is None:
            return ()
        sliding = self.both_ways == "sliding"
        return tuple(Block(begin, end, self._to_device(slots), sliding) for begin, end, slots in shown.runs)

    def _decode(
        self, vector: StepVector, states: StateStep | None = None, shown: Shown | None = None
    ) -> Tensor:  # [N, H]
        """Return the hidden states of a step's rows."""
        # a layer's pages and head groups are known only after its first run, which is not compiled; nor are steps with
        # attention in both directions, or with rows of adapters
        plain = vector.runs is None and (shown is None or self.both_ways is None)
        layers = self._layers if self._cache.ready and plain else None
        input_ids, position_ids, rotary = vector.begin(self._cache, self._blocks(shown))
        tree = Tree(None, position_ids, self._cache)
        mask = tree_mask(tree)
        inputs: dict[str, Any] = {"input_ids": input_ids[None]}
        if shown is not None:
            inputs = self.towers.inputs(self._decoder, input_ids, shown)
        for_layers: dict[str, Any] = {}
        if states is not None and self._cache.states is not None:
            for_layers["recurrence"] = self._cache.states.recurrence(states)
        record = None if self._cache.routes is None else Record()
        if record is not None:
            for_layers["routes"] = record
        compiled = layers.substituted() if layers is not None else nullcontext()
        with compiled, computing(mask), self._adapters.computing(vector.runs):
            output = self._decoder(
                **inputs,
                position_ids=position_ids[None] if rotary is None else rotary_input(position_ids, rotary),
                attention_mask=mask,
                use_cache=False,
                **keywords(self._decoder, tree),
                **for_layers,
            )
        if record is not None:
            self._cache.record_routes(record.routes())
        return output.last_hidden_state[0]

    def decode_logits(self, vector: StepVector) -> Tensor:  # [N, V] fp32
        """Return the logits of all rows of a step that is replayed.

        With equal bits the modules compute the step too, unless it is being captured; a decoder in one call whose bits
        differ is not used any more.
        """
        hidden = None if self._replayed is None or vector.runs is not None else self._replayed.run(vector)
        if hidden is None or (self._invariant and not _capturing(self._device)):
            as_modules = self._decode(vector)
            if hidden is not None and not _same_bits(hidden, as_modules):
                _log.warning(
                    "Decoding runs the model's modules: as one call a layer has other bits on %s.", self._device
                )
                self._replayed = None
            hidden = as_modules
        return self.logits(hidden, vector.head_runs)

    def _sampled(
        self,
        step: Step,
        vector: StepVector,
        logits: Tensor,  # [E, V] fp32
        drawn: DeviceSamples | None,  # samples of these logits, if a graph has drawn them
        draws: Draws,
        rows: RowTable,
    ) -> Sampled:
        slots, why = draws.slots, None
        free, columns = logits, vector.draws
        if len(draws.constrained):
            logits, why = logits.clone(), np.full(len(slots), None)
            last = step.input_ids[step.sample_rows[draws.head_row]]
            self._constraints.apply(logits, rows, slots, draws.offset, last, draws.constrained, why)
            of_rows = {name: column[: len(slots)] for name, column in columns.items()}
            out = draw(logits, of_rows, draws.filters, self._never)
            raw = free.log_softmax(-1).gather(1, out.token.clamp(min=0)[:, None])[:, 0]
            drawn = device_samples(out._replace(raw_logprob=raw))
        if drawn is None:
            drawn = device_samples(draw(logits, columns, draws.filters, self._never))
        top_id = top_logprob = top_raw = None
        if draws.most_top:
            temperature = columns["temperature"][: len(slots)]
            scaled = free / torch.where(temperature == 0, 1.0, temperature)[:, None]
            top = scaled.topk(min(draws.most_top, self.vocabulary), dim=-1)
            top_id = top.indices.cpu().numpy()
            top_logprob = (top.values - scaled.logsumexp(-1, keepdim=True)).cpu().numpy()
            top_raw = (free.gather(1, top.indices) - free.logsumexp(-1, keepdim=True)).cpu().numpy()
        kept = None
        if len(draws.keeping):
            keeping = self._to_device(draws.keeping)
            indptr, ids = kept_tokens(logits.index_select(0, keeping), drawn.out.last_kept.index_select(0, keeping))
            kept = np.empty(len(slots), object)
            for i, of_row in zip(
                draws.keeping.tolist(), np.split(ids.int().cpu().numpy(), indptr[1:-1].cpu().numpy()), strict=True
            ):
                kept[i] = of_row
        fetched = drawn.fetch(len(slots), step.steps)
        if why is not None:
            for i in draws.constrained[fetched[0][draws.constrained] < 0].tolist():
                if why[i] is None and not free[i].isnan().any():
                    why[i] = NOTHING_LEFT
        return Sampled(*fetched, top_id, top_logprob, top_raw, kept, why)

    def logits(self, hidden: Tensor, runs: Runs | None = None) -> Tensor:  # [S, H] -> [S, V] fp32
        """Compute logits that are never rounded below fp32: products in the weights' dtype are summed in fp32. ``runs``
        are the rows that have adapters."""
        weight, bias, softcap, lora, scale, _ = self._head()
        product = self._product
        if product is None or product.weight is not weight or lora is not None:
            product = Head(weight, None, lora, torch.float32)
            # not cached with an adapter, whose tensors may be others in the next step
            self._product = product if lora is None else None
        logits = hidden.new_empty((len(hidden), len(weight)), dtype=torch.float32)
        product.logits(hidden, logits)
        if runs is not None and (adapters := self._adapters.tables.head) is not None:
            add_low_rank_(logits, hidden.float(), adapters, runs)
        if bias is not None:
            logits = logits + bias.float()
        if scale != 1:
            logits = logits * scale
        if softcap is not None:
            logits = softcapped(logits, softcap)
        return logits

    def _to_device(self, values: Array) -> Tensor:
        return torch.from_numpy(values).to(self._device)


def _capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _same_bits(x: Tensor, y: Tensor) -> bool:
    kind = torch.int16 if x.dtype == torch.bfloat16 else torch.int32
    return torch.equal(x.view(kind), y.view(kind))


def _places(model: PreTrainedModel, cache: KvCache) -> tuple[int, ...]:
    pages = (tensor for kv in cache.pages.values() for tensor in kv)
    return tuple(tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers(), *pages))
