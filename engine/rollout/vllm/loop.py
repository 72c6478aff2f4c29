"""Branches as requests of vLLM: each segment is one, its prompt is the path so far, which vLLM's prefix cache holds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from ...batches.cost import CostModel, Work
from ...data.media import FIRST_ID
from ...data.segment import LeafStatus, Origin
from ...model.pictures import placeholders_of
from ..branch import Branch, Node, Request
from ..records import child_seed, join, sample_dtype, unsampled
from ..steering import Steering
from .pictures import prompt_of

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

Array = npt.NDArray[Any]


@dataclass(eq=False)
class Flow:
    """A segment of a branch that vLLM samples."""

    branch: Branch
    begin: int
    """Number of the node's records before the segment."""
    end: int
    """Response length at which the segment is full."""
    records: list[Array] = field(default_factory=list)


class VllmLoop(Steering):
    """Samples branches with vLLM.

    Args:
        llm: an engine in this process with logprobs_mode "processed_logprobs", or "raw_logprobs" if both are equal.
        eos: tokens that end a response unless its parameters ignore them.
        cost: of the model, to count FLOP: those of drafts and of log-probs that are scored again are not known.
        raw_logprobs: score finished responses again, by prefill, if their raw log-probs differ from those that they
            were sampled with.
    """

    def __init__(self, llm: LLM, eos: set[int], cost: CostModel, *, raw_logprobs: bool) -> None:
        super().__init__(llm.model_config.get_vocab_size())
        self._engine = llm.llm_engine
        self._eos, self._cost = eos, cost
        self._placeholders = placeholders_of(llm.model_config.hf_config)  # the first one is a picture's
        self._raw = raw_logprobs
        self.adapter: LoRARequest | None = None
        self._flows: dict[str, Flow] = {}
        self._ids: dict[Branch, str] = {}
        self._scores: dict[str, Branch] = {}  # requests that score a leaf
        self._unscored: dict[int, int] = {}  # leaves of a finished request, by its number
        self._count = 0

    @property
    def queued(self) -> Iterable[Request]:
        return ()  # vLLM has a queue of its own

    def add(self, request: Request) -> None:
        forks = 0 if request.started else self.first_branches(request)
        self.requests.append(request)
        try:
            if request.started:
                self._attach(request)
            else:
                self._start(request, forks)
        except BaseException:  # vLLM has checks of its own
            self._let_go(request)
            raise

    def _start(self, request: Request, forks: int) -> None:
        request.started = True
        root = Node(None, 0, unsampled(request.prompt), Origin.PROMPT, sealed=True)
        branch = Branch(request, (), root, request.seed, request.next_order(), (0,), request.params.temperature)
        request.sampling[branch.id] = branch
        self._sample(branch, forks, self.segment_end(request, 0, request.program.segment_tokens))

    def step(self) -> list[Request]:
        self._collect_calls()
        if not self._flows and not self._scores:
            self._await_calls()
            return self._hand_out()
        try:
            outputs = self._engine.step()
        except BaseException as error:
            self._give_up(error)
            if not isinstance(error, Exception):
                raise
            return self._hand_out()
        ended, sampled = [], 0
        for output in outputs:
            if (leaf := self._scores.pop(output.request_id, None)) is not None:
                with self._alone(leaf.request):
                    self._take_score(leaf, output)
            elif (flow := self._flows.get(output.request_id)) is not None:
                with self._alone(flow.branch.request):
                    self._count_flop(flow, output)
                    sampled += self._take(flow, output.outputs[0])
                    if output.finished:
                        ended.append(self._end(flow, output.outputs[0]))
        self.counts["steps"] += 1
        self.counts["sampled_tokens"] += sampled
        self.counts["row_steps"] += sampled
        unfinished = sum(len(request.sampling) + len(request.resting) for request in self.requests)
        self.counts["idle_row_steps"] += max(unfinished - sampled, 0)
        self._report(ended)
        return self._hand_out()

    def _count_flop(self, flow: Flow, output: Any) -> None:
        """Count what vLLM computed for an output of a flow: the rows whose logits gave its tokens, and with the first
        output the prompt's rows whose keys were not cached."""
        path, count = self._path_length(flow), len(output.outputs[0].token_ids)
        first = path - 1 if flow.records else (output.num_cached_tokens or 0)
        rows = path - 1 + count - first
        flop = round(self._cost.forward(Work(rows, rows * first + rows * (rows + 1) // 2, count)))
        self.counts["flop"] += flop
        if flow.branch.request.held_out:
            self.counts["held_out_flop"] += flop

    @staticmethod
    def _path_length(flow: Flow) -> int:
        """Return the tokens of a flow's path so far, the prompt's included."""
        node = flow.branch.node
        return node.start + len(node.records) + sum(map(len, flow.records))

    def _give_up(self, error: BaseException) -> None:
        """Fail every request that vLLM computed, because vLLM does not report which one made the step fail."""
        self.counts["failed_steps"] += 1
        if not isinstance(error, Exception):
            error = RuntimeError(f"The step that computed this request was ended by {type(error).__name__}.")
        leaves = [*(flow.branch for flow in self._flows.values()), *self._scores.values()]
        for request in {leaf.request.number: leaf.request for leaf in leaves}.values():
            self._fail(request, error)
        self._engine.reset_prefix_cache()  # it may list keys that were not computed

    def abort(self, request: Request) -> None:
        for branch in request.sampling.values():
            flow = self._flows[self._ids[branch]]
            self._keep(flow)
            branch.saved = {"begin": flow.begin, "end": flow.end}
        self._let_go(request)

    def preempt_all(self) -> None:
        flows, leaves = list(self._flows.values()), list(self._scores.values())
        for flow in flows:
            self._keep(flow)
            self._drop(flow.branch)
        self._engine.abort_request(list(self._scores))
        self._scores.clear()
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its cached keys, although no request is left; start a new engine.")
        self._ask_scores(leaves)
        for flow in flows:
            if not flow.branch.request.done:
                with self._alone(flow.branch.request):
                    self._launch(flow.branch, flow.begin, flow.end)

    def _attach(self, request: Request) -> None:
        for branch in request.sampling.values():
            assert branch.saved is not None
            self._launch(branch, branch.saved["begin"], branch.saved["end"])
            branch.saved = None
        self._resume_calls(request)
        if request.finished and not request.calls and not request.done:
            self._complete(request)

    # -- to vLLM and back -------------------------------------------------------------------------------------------

    def _launch(self, branch: Branch, begin: int, end: int) -> None:
        params, program = branch.request.params, branch.request.program
        length = self._length(branch)
        stop_ids = set(params.stop_token_ids) | set(program.segment_stop_token_ids)
        stop_ids |= set() if params.ignore_eos else self._eos
        of_branch = SamplingParams(
            temperature=branch.temperature,
            top_p=params.top_p,
            top_k=params.top_k or 0,
            min_p=params.min_p or 0.0,
            # vLLM's generator restarts with every request, so the seed depends on the length so far
            seed=int(child_seed(branch.seed, program.drawn + length)) & 2**63 - 1,
            max_tokens=end - length,
            stop=[*params.stop, *program.segment_stop] or None,
            include_stop_str_in_output=True,
            stop_token_ids=sorted(stop_ids | set(self._placeholders)),
            ignore_eos=True,  # those that count are named
            logprobs=max(params.top_logprobs, program.top_logprobs),
            logit_bias=dict(params.logit_bias) or None,
            allowed_token_ids=None if params.allowed_token_ids is None else list(params.allowed_token_ids),
            detokenize=bool(params.stop or program.segment_stop),
            output_kind=RequestOutputKind.DELTA,
        )
        id_ = self._add_to_vllm(branch, of_branch)
        self._flows[id_] = Flow(branch, begin, end)
        self._ids[branch] = id_

    def _add_to_vllm(self, branch: Branch, params: SamplingParams) -> str:
        self._count += 1
        id_, media = str(self._count), branch.request.media
        placeholder = self._placeholders[0] if media is not None else 0
        prompt = prompt_of(branch.node.column("token"), media, placeholder)
        self._engine.add_request(id_, prompt, params, lora_request=self.adapter)
        return id_

    def _take(self, flow: Flow, output: Any) -> int:
        """Record the new tokens of a flow and return their number."""
        program = flow.branch.request.program
        params = replace(flow.branch.request.params, temperature=flow.branch.temperature)
        top = max(params.top_logprobs, program.top_logprobs)
        records = np.zeros(len(output.token_ids), sample_dtype(top))
        for record, token, logprobs in zip(records, output.token_ids, output.logprobs or (), strict=True):
            record["token"], record["version"] = token, self.version
            record["logprob"] = logprobs[token].logprob if params.temperature else 0.0
            record["raw_logprob"] = logprobs[token].logprob if is_plain(params) else np.nan
            record["entropy"] = np.nan
            ranked = sorted(logprobs.items(), key=lambda item: item[1].rank)[:top]
            record["top_id"] = [id_ for id_, _ in ranked]
            record["top_logprob"] = [value.logprob for _, value in ranked]
            record["top_raw"] = record["top_logprob"] if is_plain(params) else np.nan
        flow.records.append(records)
        return len(records)

    def _keep(self, flow: Flow) -> None:
        """Move the records of a flow into its node."""
        node = flow.branch.node
        if flow.records:
            # records of a node that has none yet have no room for likely tokens
            node.records = np.concatenate([*([node.records] if len(node.records) else []), *flow.records])
            flow.records = []

    def _end(self, flow: Flow, output: Any) -> Any:
        branch, stop = flow.branch, output.stop_reason
        self._keep(flow)
        del self._flows[self._ids.pop(branch)]
        request = branch.request
        in_segment = stop in request.program.segment_stop_token_ids or stop in request.program.segment_stop
        status = None
        if stop in self._placeholders:
            status = LeafStatus.FAILED
            request.errors[branch.id] = f"vLLM sampled token {stop}, which stands for a picture and is no text"
        elif output.finish_reason == "stop" and not in_segment:
            status = LeafStatus.STOP
        elif output.finish_reason not in ("stop", "length"):
            status = LeafStatus.FAILED
            request.errors[branch.id] = f"vLLM ended it with '{output.finish_reason}'"
        elif self._length(branch) >= request.params.max_new_tokens:
            status = LeafStatus.LENGTH
        segment = branch.node.records[flow.begin :]
        return self._end_segment(branch, segment, status, stop if isinstance(stop, str) else None)

    # -- raw log-probs ----------------------------------------------------------------------------------------------

    def _complete(self, request: Request) -> None:
        params = request.params
        if not self._raw or is_plain(params) or request.number in self._unscored:
            self._unscored.pop(request.number, None)
            super()._complete(request)
            return
        leaves = [leaf for leaf in request.leaves.values() if leaf.length]
        self._unscored[request.number] = len(leaves)
        self._ask_scores(leaves)
        if not leaves:
            self._complete(request)

    def _ask_scores(self, leaves: Iterable[Branch]) -> None:
        params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0, detokenize=False)
        for leaf in leaves:
            self._scores[self._add_to_vllm(leaf, params)] = leaf

    def _take_score(self, leaf: Branch, output: Any) -> None:
        tokens = leaf.node.column("token").tolist()
        raw = [
            np.nan if logprobs is None or t >= FIRST_ID else logprobs[t].logprob  # vLLM has placeholders for pictures
            for t, logprobs in zip(tokens, output.prompt_logprobs, strict=True)
        ]
        for node in leaf.node.path():
            if node.origin is Origin.SAMPLED:
                node.records["raw_logprob"] = raw[node.start : node.start + len(node.records)]
        request = leaf.request
        self._unscored[request.number] -= 1
        if not self._unscored[request.number] and request in self.requests:
            self._complete(request)

    # -- actions of programs ----------------------------------------------------------------------------------------

    def _length(self, branch: Branch) -> int:
        return branch.node.start + len(branch.node.records) - len(branch.request.prompt)

    def path_so_far(self, branch: Branch) -> Array:  # [prompt + response] int32
        flow = self._flows.get(self._ids.get(branch, ""))
        more = [records["token"] for records in flow.records] if flow else []
        return np.concatenate([branch.node.column("token"), *more])

    def records_so_far(self, branch: Branch) -> Array:  # [response] records
        flow = self._flows.get(self._ids.get(branch, ""))
        nodes = [node for node in branch.node.path() if node.parent is not None][::-1]
        return join([*(node.records for node in nodes), *(flow.records if flow else [])])

    def _seal(self, branch: Branch) -> None:
        branch.node.sealed = True

    def _append(self, branch: Branch, node: Node) -> None:
        pass

    def _open(self, branch: Branch, source: Branch, length: int) -> None:
        pass

    def _sample(self, branch: Branch, n: int, segment_end: int) -> None:
        if n == 1 and not branch.node.sealed:
            self._launch(branch, len(branch.node.records), segment_end)
            return
        branch.node.sealed = True
        request = branch.request
        del request.sampling[branch.id]
        for child in self.children(branch, n):
            request.sampling[child.id] = child
            self._launch(child, 0, segment_end)

    def _drop(self, branch: Branch) -> None:
        if (id_ := self._ids.pop(branch, None)) is not None:
            del self._flows[id_]
            self._engine.abort_request([id_])

    def _retire(self, branch: Branch) -> None:
        pass

    def _let_go(self, request: Request) -> None:
        scores = [id_ for id_, leaf in self._scores.items() if leaf.request is request]
        for id_ in scores:
            del self._scores[id_]
        if scores:
            self._engine.abort_request(scores)
        self._unscored.pop(request.number, None)
        super()._let_go(request)


def is_plain(params: Any) -> bool:
    """Return True if tokens are sampled from softmax(logits) itself."""
    filtered = params.top_p < 1 or params.top_k or params.min_p
    return params.temperature == 1 and not filtered and not params.constrained
