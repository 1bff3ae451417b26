"""CUDA graphs of blocks: once captured, a block's launches are one call of the host in each direction.

A graph repeats launches with the numbers of the host and the memory that they had when it was captured. So there is one
for each block and shape of a batch (`VarlenPlan.with_fixed_shapes`), the batch lies in a buffer that stays, and inputs
from outside of the blocks are copied to where graphs read them. Gradients are exchanged between graphs. A block runs
once without a graph, so that its kernels are compiled, before it is captured.

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

from megatron_lite.transformer.fused_block import BlockConstants, FusedBlock, FusedParameters, _Product
from megatron_lite.transformer.kernels.qkv_heads import HeadTransform

MOST_SHAPES = 4  # with a graph; batches of others run without
RESULTS = 6  # hidden states that stay of a block and shape: two of its forward pass, two of each of two backward ones


class GradientSums(Protocol):
    """Where gradients are added up."""

    def is_accumulated(self, parameter: nn.Parameter) -> bool:
        """Whether there is a sum, to which the next gradient is added."""

    def write_weight_grad(
        self, parameter: nn.Parameter, grad: torch.Tensor, inputs: torch.Tensor, accumulate: bool
    ) -> None:
        """Launch the product grad^T inputs, [out, in], added to the sum or written over it. Args: [T, out], [T, in]."""

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

    def __init__(self, sums: GradientSums):
        self.sums = sums
        # One pool for all graphs: without it each would keep its own memory.
        self.pool = torch.cuda.graph_pool_handle()
        # Address of a graph's result -> the result, and that of the same block's other graph: see `add_results`.
        self.results: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}
        self.shapes: set[Any] = set()
        self.angles: dict[
            Any, tuple[torch.Tensor, ...]
        ] = {}  # where graphs read cosines and sines, by their shape
        self.copied_cos: torch.Tensor | None = None  # of the batch whose angles lie there

    def add_to(self, parameters: FusedParameters | None) -> FusedParameters | None:
        """The parameters of a block, which then runs as graphs where it can."""
        if parameters is None:
            return None
        return parameters._replace(run=_BlockGraphs(parameters, self).run)

    def admits(self, shape: Any) -> bool:
        if len(self.shapes) < MOST_SHAPES:
            self.shapes.add(shape)
        return shape in self.shapes

    def with_fixed_angles(self, transform: HeadTransform) -> HeadTransform:
        """The transform with its angles copied to where graphs read them, once for all blocks of a batch."""
        if transform.cos is None or transform.sin is None:
            return transform
        angles = transform.cos, transform.sin
        fixed = self.angles.setdefault(transform.cos.shape, tuple(map(torch.empty_like, angles)))
        if self.copied_cos is not transform.cos:
            self.copied_cos = transform.cos
            for target, source in zip(fixed, angles, strict=True):
                target.copy_(source)
        return transform._replace(cos=fixed[0], sin=fixed[1])

    def input_memory(self, tensor: torch.Tensor | None, begun: bool) -> torch.Tensor | None:
        """Where a graph reads an input: where another graph has written it, or in memory for it."""
        if tensor is None:
            return None
        results = self.results.get(address(tensor))
        return torch.empty_like(tensor) if results is None else results[begun]

    def add_results(
        self, first: Iterable[torch.Tensor | None], second: Iterable[torch.Tensor | None]
    ) -> None:
        """The same results of two graphs, one of which runs: with sums that begin, and with sums that have begun."""
        for one, other in zip(first, second, strict=True):
            if one is not None and other is not None:
                self.results |= {address(tensor): (one, other) for tensor in (one, other)}


class _BlockGraphs:
    """A block's graphs by shape."""

    def __init__(self, parameters: FusedParameters, graphs: BlockGraphs):
        self.parameters, self.graphs = parameters, graphs
        self.warm: set[Any] = set()
        self.passes: dict[Any, _Pass] = {}

    def run(self, hidden: torch.Tensor, x: torch.Tensor | None, constants: BlockConstants) -> Any:
        """As `FusedBlock.apply`."""
        plan = constants.plan
        shape = plan.shape if plan.has_fixed_shapes else None
        if shape is not None:
            transform = self.graphs.with_fixed_angles(constants.transform)
            constants = constants._replace(transform=transform)
        if shape is None or not self.graphs.admits(shape):
            return FusedBlock.apply(hidden, x, constants)
        read = tree_leaves((constants.x_dropout, constants.attended_dropout, constants.transform))
        inputs = [address(leaf) for leaf in read if isinstance(leaf, torch.Tensor)]
        key = shape, x is None, *inputs, *(address(array) for array in plan.tensors)
        # The first run compiles Triton's kernels, which a capture must not do.
        if key not in self.warm:
            self.warm.add(key)
            return FusedBlock.apply(hidden, x, constants)
        if key not in self.passes:
            self.passes[key] = _Pass(self.graphs, constants._replace(block=self.parameters))
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
    inputs: Tensors  # where the graph reads them
    results: Tensors

    def run(self, inputs: Tensors) -> Tensors:
        for source, target in zip(inputs, self.inputs, strict=True):
            if source is not None and target is not None and address(source) != address(target):
                target.copy_(source)
        self.replay()
        return tuple(None if result is None else result.detach() for result in self.results)


class _Context(SimpleNamespace):
    """Takes the place of autograd's."""

    def save_for_backward(self, *tensors: torch.Tensor) -> None:
        self.saved_tensors = tensors


class _Pass:
    """The graphs of a block for a shape: one forward; backward one that begins the sums of gradients, one that adds.

    Args: constants: of the pass that is captured.
    """

    def __init__(self, graphs: BlockGraphs, constants: BlockConstants):
        parameters = constants.block
        self.graphs, self.accumulate = graphs, parameters.accumulate
        products = {
            name: value for name, value in parameters._asdict().items() if isinstance(value, _Product)
        }
        self.weights = [product.weight for product in products.values()]
        # Gradients of biases and norms that a backward graph has written, by whether the sums have begun.
        self.other_gradients: dict[bool, list[tuple[nn.Parameter, torch.Tensor]]] = {False: [], True: []}
        self.begun = False

        def only_launches(product: _Product) -> _Product:
            write = graphs.sums.write_weight_grad
            return product._replace(
                accumulate=lambda grad, rows: write(product.weight, grad, rows, self.begun)
            )

        launches = parameters._replace(
            accumulate=lambda *pair: self.other_gradients[self.begun].append(pair),
            **{name: only_launches(product) for name, product in products.items()},  # type: ignore[arg-type]
        )
        self.constants = constants._replace(block=launches)
        self.context: _Context | None = _Context()
        self.forward_graph: _Graph | None = None
        self.backward_graphs: dict[bool, _Graph] = {}

    def _capture(self, function: Callable[..., Any], inputs: Tensors, *constants: BlockConstants) -> _Graph:
        memory = [self.graphs.input_memory(tensor, self.begun) for tensor in inputs]
        # A copy for each of the two backward captures: what one takes out must still be there for the other.
        context = copy.copy(self.context) if self.forward_graph else self.context
        replay, results = capture(lambda: function(context, *memory, *constants), self.graphs.pool)
        return _Graph(replay, memory, results[:2])

    def forward(self, *inputs: torch.Tensor | None) -> Tensors:
        if self.forward_graph is None:
            self.forward_graph = self._capture(FusedBlock.forward, inputs, self.constants)
            self.graphs.add_results(self.forward_graph.results, self.forward_graph.results)
        return self.forward_graph.run(inputs)

    def backward(self, *grads: torch.Tensor) -> Tensors:
        # Whether to write or to add is fixed in a captured product, so there are two backward graphs.
        if not self.backward_graphs:
            for self.begun in (False, True):
                self.backward_graphs[self.begun] = self._capture(FusedBlock.backward, grads)
            self.graphs.add_results(self.backward_graphs[False].results, self.backward_graphs[True].results)
            self.context = None
        begun = self.graphs.sums.is_accumulated(self.weights[0])
        results = self.backward_graphs[begun].run(grads)
        for weight in self.weights:
            # A graph repeats launches only; the host's bookkeeping of the bucket follows here.
            self.graphs.sums.count_weight_grad(weight)
        for parameter, gradient in self.other_gradients[begun]:
            self.accumulate(parameter, gradient)
        return results
