"""CUDA graphs of blocks: once captured, a block's launches are one call of the host in each direction.

A graph repeats launches with the numbers of the host and the memory that they had when it was captured. So there is one
for each block and shape of a batch (`VarlenPlan.fixed`), the batch lies in a buffer that stays, and what comes from
outside of the blocks is copied to where graphs read it. Gradients are exchanged between graphs. A block runs once
without a graph, so that its kernels are compiled, before it is captured.

Memory of a block is free for the next capture as soon as its backward pass is captured: passes follow each other, so
nothing of one is needed in another. What blocks return stays, see RESULTS.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from megatron_lite.model.fused_block import FusedParameters, _FusedBlock, _Product
from megatron_lite.model.kernels.qkv_heads import HeadForm

MOST_SHAPES = 4  # with a graph; batches of others run without
RESULTS = 6  # hidden states that stay of a block and shape: two of its forward pass, two of each of two backward ones

Taken = list[tuple[nn.Parameter, torch.Tensor]]


class Sums(Protocol):
    """Where gradients are added up."""

    def is_accumulated(self, parameter: nn.Parameter) -> bool:
        """Whether there is a sum, to which the next gradient is added."""

    def write_weight_grad(
        self, parameter: nn.Parameter, grad: torch.Tensor, inputs: torch.Tensor, accumulate: bool
    ) -> None:
        """Launch the product grad^T inputs, added to the sum, or written over it."""

    def count_weight_grad(self, parameter: nn.Parameter) -> None:
        """The host's bookkeeping, after `write_weight_grad`."""


def address(tensor: torch.Tensor) -> Any:
    return tensor.data_ptr()


def capture(run: Callable[[], Any], pool: Any) -> tuple[Callable[[], None], Any]:
    """A graph of the launches of `run`, as a function that repeats them, and its results, not yet computed.

    Other threads may use CUDA meanwhile: one prepares the next step.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        results = run()
    return graph.replay, results


class BlockGraphs:
    """The graphs of all blocks of a model. Args: sums: of gradients of products."""

    def __init__(self, sums: Sums):
        self.sums = sums
        # One pool for all graphs: without it each would keep its own memory.
        self.pool = torch.cuda.graph_pool_handle()
        # Address of what a graph returns, which stays there -> that and its counterpart: by whether sums have begun.
        self.kept: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self.shapes: set[Any] = set()
        self.angles: dict[Any, tuple[torch.Tensor, ...]] = {}  # where graphs find cosines and sines
        self.turning: torch.Tensor | None = None  # the cosines that lie there

    def put(self, parts: FusedParameters | None) -> FusedParameters | None:
        """The parts of a block, which then runs as graphs where it can."""
        return None if parts is None else parts._replace(run=_Block(parts, self).run)

    def admits(self, shape: Any) -> bool:
        if len(self.shapes) < MOST_SHAPES:
            self.shapes.add(shape)
        return shape in self.shapes

    def settled(self, form: HeadForm) -> HeadForm:
        """The form with its angles where those of every pass lie: copied at the first block of a pass."""
        if form.cos is None or form.sin is None:
            return form
        found = form.cos, form.sin
        places = self.angles.setdefault(form.cos.shape, tuple(map(torch.empty_like, found)))
        if self.turning is not form.cos:
            self.turning = form.cos
            for place, given in zip(places, found, strict=True):
                place.copy_(given)
        return form._replace(cos=places[0], sin=places[1])

    def own(self, tensor: torch.Tensor | None, begun: bool) -> torch.Tensor | None:
        """Where a graph finds what it is given: where another graph left it, or in memory for it."""
        if tensor is None:
            return None
        pair = self.kept.get(address(tensor))
        return torch.empty_like(tensor) if pair is None else pair[begun]

    def keep(self, first: Iterable[torch.Tensor | None], second: Iterable[torch.Tensor | None]) -> None:
        """The same results of two graphs, of which one runs."""
        for one, other in zip(first, second, strict=True):
            if one is not None and other is not None:
                self.kept |= {address(tensor): (one, other) for tensor in (one, other)}


class _Block:
    """A block's graphs by shape."""

    def __init__(self, parts: FusedParameters, graphs: BlockGraphs):
        self.parts, self.graphs = parts, graphs
        self.warm: set[Any] = set()
        self.passes: dict[Any, _Pass] = {}

    def run(self, hidden: torch.Tensor, x: torch.Tensor | None, parameters: Any, *rest: Any) -> Any:
        """As `_FusedBlock.apply`."""
        *others, form, plan = rest
        shape = plan.shape if plan.is_fixed else None
        if shape is not None:
            form = self.graphs.settled(form)
            others, rest = [*others, form], (*others, form, plan)
        if shape is None or not self.graphs.admits(shape):
            return _FusedBlock.apply(hidden, x, parameters, *rest)
        inputs = [address(leaf) for leaf in tree_leaves(others) if isinstance(leaf, torch.Tensor)]
        key = shape, x is None, *inputs, *(address(array) for array in plan.tensors)
        # The first run compiles Triton's kernels, which a capture must not do.
        if key not in self.warm:
            self.warm.add(key)
            return _FusedBlock.apply(hidden, x, parameters, *rest)
        if key not in self.passes:
            self.passes[key] = _Pass(self.parts, self.graphs, (parameters[0], *rest))
        return _Replayed.apply(hidden, x, self.passes[key])


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden, x, graphs):  # type: ignore[no-untyped-def]
        ctx.graphs = graphs
        return graphs.forward(hidden, x)

    @staticmethod
    def backward(ctx: Any, d_total, d_out):  # type: ignore[no-untyped-def]
        return *ctx.graphs.backward(d_total.contiguous(), d_out.contiguous()), None


Tensors = Sequence[torch.Tensor | None]


class _Graph(NamedTuple):
    replay: Callable[[], None]
    inputs: Tensors  # where it finds them
    results: Tensors

    def run(self, inputs: Tensors) -> Tensors:
        for tensor, place in zip(inputs, self.inputs, strict=True):
            if tensor is not None and place is not None and address(tensor) != address(place):
                place.copy_(tensor)
        self.replay()
        return tuple(None if result is None else result.detach() for result in self.results)


class _Context(SimpleNamespace):
    """Takes the place of autograd's."""

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


class _Pass:
    """The graphs of a block for a shape: one forward; backward one that begins the sums of gradients, one that adds.

    Args: others: arguments of `_FusedBlock` beside the tensors, with the bias of x in place of the parameters.
    """

    def __init__(self, parts: FusedParameters, graphs: BlockGraphs, others: tuple[Any, ...]):
        self.graphs, self.others, self.take = graphs, others, parts.take
        self.products = [part.weight for part in parts if isinstance(part, _Product)]
        self.taken: dict[bool, Taken] = {False: [], True: []}
        self.begun = False
        write = graphs.sums.write_weight_grad

        def writing(part: _Product) -> _Product:
            return part._replace(take=lambda grad, rows: write(part.weight, grad, rows, self.begun))

        fields: dict[str, Any] = {
            name: writing(part) for name, part in parts._asdict().items() if isinstance(part, _Product)
        }
        fields["take"] = lambda *pair: self.taken[self.begun].append(pair)
        self.parts = parts._replace(**fields)
        self.context: _Context | None = _Context()
        self.forwards: _Graph | None = None
        self.backwards: dict[bool, _Graph] = {}

    def _captured(self, function: Callable[..., Any], inputs: Tensors, rest: tuple[Any, ...] = ()) -> _Graph:
        own = [self.graphs.own(tensor, self.begun) for tensor in inputs]
        # A copy for each of the two backward captures: what one takes out must still be there for the other.
        context = copy.copy(self.context) if self.forwards else self.context
        replay, results = capture(lambda: function(context, *own, *rest), self.graphs.pool)
        return _Graph(replay, own, results[:2])

    def forward(self, *inputs: torch.Tensor | None) -> Tensors:
        if self.forwards is None:
            x_bias, *rest = self.others
            self.forwards = self._captured(_FusedBlock.forward, inputs, ((x_bias, self.parts), *rest))
            self.graphs.keep(self.forwards.results, self.forwards.results)
        return self.forwards.run(inputs)

    def backward(self, *grads: torch.Tensor) -> Tensors:
        if not self.backwards:
            for self.begun in (False, True):
                self.backwards[self.begun] = self._captured(_FusedBlock.backward, grads)
            self.graphs.keep(self.backwards[False].results, self.backwards[True].results)
            self.context = None
        # Whether to write or to add is fixed in a captured product, so there are two backward graphs.
        begun = self.graphs.sums.is_accumulated(self.products[0])
        results = self.backwards[begun].run(grads)
        for weight in self.products:
            # A graph repeats launches only; the host's bookkeeping of the bucket follows here.
            self.graphs.sums.count_weight_grad(weight)
        for parameter, gradient in self.taken[begun]:
            self.take(parameter, gradient)
        return results
