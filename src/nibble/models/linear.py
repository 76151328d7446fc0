"""Linear layers and experts of a model, replaced by faster ones whose results depend on no other tokens.

On a CPU plain float32 products sum in another order for 1 token than for 8. Quantised K and V can turn such a last-bit
difference into a whole step, and an answer would depend on the batch. oneDNN products over weights packed for small
batches do not have that, except for a single row, and are 2 to 3 times faster from 2 tokens on. Experts, which multiply
as many rows as they get, use the same products. Without oneDNN, and where weights cannot be packed, all stays as it is.

On a GPU layers that read the same input become one product (queries, keys and values; gate and up). Which layers do is
observed: the model runs once without weights, and records which linear layers get the same tensor. One wide product
reads its weights faster than several narrow ones, and a decode step is hardly more than reading weights. Modules keep
their places and names; the first that is called computes for all. Other layers use the same kernel for few rows where
it is faster; where a module calls F.linear itself, as routers do, a compiler replaces that (graph_passes.py).

Shape suffixes: T tokens, K experts of a token, N rows of one expert, H hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.integrations.moe import ExpertsInterface
from transformers.pytorch_utils import Conv1D

from nibble.kernels import gated, linear, quantized_linear
from nibble.kernels.quantized_linear import quantize_activations
from nibble.kernels.quantized_linear.matrix import TENSORS, KernelKey, PackedMatrix, merged
from nibble.kernels.weight_formats import Activations
from nibble.models.experts import serve_experts, set_packed_experts
from nibble.models.observe import record_calls, skeleton
from nibble.models.pack import Packer
from nibble.models.quantization import Quantization
from nibble.models.routers import serve_routers
from nibble.models.shared_experts import join_shared_experts
from nibble.models.weight_bytes import ALWAYS_PLAIN

PACKED_FOR = 8
"""Number of tokens that weights are packed for."""
GATE_UP = "gate_up_proj"
"""What families call a layer that computes both."""
KERNELS = "nibble_kernels"
"""The attribute of a model with the Preparation of its packed layers."""
VECTOR = 32
"""Most values that torch's vectorised functions take at once on a CPU."""


def is_available() -> bool:
    """Return whether this build of torch can pack weights."""
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")


@functools.cache
def _onednn_product() -> Any:
    """Return oneDNN's product, looked up once: the lookup costs as much as a small product."""
    return torch.ops.mkldnn._linear_pointwise.default


def pack(weight: Tensor) -> Tensor:
    """Pack `weight` [out, in] into an opaque tensor for packed_linear()."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), PACKED_FOR)


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b for a packed W.

    Args:
        x: float32 [..., in].
        packed: from pack().
        bias: [out].
    """
    if x.numel() > x.shape[-1]:
        y: Tensor = _onednn_product()(x, packed, bias, "none", [], "")
    else:
        # A single row is summed in another order than one of several, so it is doubled.
        pair = _onednn_product()(x.reshape(1, -1).repeat(2, 1), packed, bias, "none", [], "")
        y = pair[:1].reshape(*x.shape[:-1], -1)
    return apart(y) if y.shape[-1] % VECTOR else y


def apart(y: Tensor) -> Tensor:
    """Return the same values with a gap behind each row.

    torch computes an activation function (silu, sigmoid) over whole vectors, and what is left in another way, with
    other last bits. Over rows without a gap what is left depends on how many there are; with one, a row is by itself.
    """
    width = y.shape[-1]
    spaced = y.new_empty(*y.shape[:-1], VECTOR * (width // VECTOR + 1))[..., :width]
    return spaced.copy_(y)


class PackedLinear(nn.Module):
    """y = x W^T + b with W [out, in] packed by oneDNN; the packed weight replaces the plain one."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.packed = pack(weight)
        self.bias = bias

    @property
    def weight(self) -> Tensor:
        """Return the plain weight, unpacked at each access, for models that read its dtype or values."""
        return self.packed.to_dense()

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b."""
        return packed_linear(x, self.packed, self.bias)


class PackedWeight(Tensor):
    """The weight of a module that calls F.linear itself, as routers do: such calls use the packed form."""

    packed: Tensor

    @staticmethod
    def from_weight(weight: Tensor) -> PackedWeight:
        """Return `weight` with its packed form beside it."""
        packed_weight: PackedWeight = weight.detach().as_subclass(PackedWeight)
        packed_weight.packed = pack(weight)
        return packed_weight

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_packed = func is F.linear and len(args) > 1 and hasattr(args[1], "packed")
        if is_packed and args[0].dtype == torch.float32:
            return packed_linear(args[0], args[1].packed, args[2] if len(args) > 2 else kwargs.get("bias"))
        # Without this, func() would come back to this method.
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        # A cast to the same dtype gives the same values, and must not lose the packed form.
        return args[0] if func in _CASTS and result.dtype == args[0].dtype else result


_CASTS = frozenset({Tensor.to, Tensor.type, Tensor.float})


def pack_linears(model: nn.Module) -> int:
    """Pack the float32 linear layers of a CPU model in place; return their number."""
    if not is_available():
        return 0
    # A list first, because replacing a layer changes what named_children() walks over.
    children = [(parent, *child) for parent in model.modules() for child in parent.named_children()]
    packed = [_pack_linear(parent, name, child) for parent, name, child in children]
    return sum(packed)


def _pack_linear(parent: nn.Module, name: str, child: nn.Module) -> bool:
    """Pack one module if it is a linear layer; return whether it was."""
    # From _parameters, because `weight` may also be a property, as PackedLinear's is.
    weight = child._parameters.get("weight")
    if weight is None or weight.dim() != 2 or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return False
    # Exactly this class: a subclass may compute something else.
    if type(child) is nn.Linear:
        setattr(parent, name, PackedLinear(weight, child.bias))
    # Conv1D, the layer of GPT-2, stores [in, out].
    elif isinstance(child, Conv1D):
        setattr(parent, name, PackedLinear(weight.T, child.bias))
    # An embedding is looked up, not multiplied.
    elif isinstance(child, (nn.Embedding, nn.Linear)):
        return False
    else:
        # torch refuses a plain tensor under a name that belongs to a parameter.
        del child.weight
        child.weight = PackedWeight.from_weight(weight)
    return True


_EXPERTS = "nibble_packed"
PACKED_EXPERTS = "nibble_packed_experts"
_EXPERT_WEIGHTS = ("gate_up_proj", "up_proj", "down_proj")


def pack_experts(model: nn.Module) -> int:
    """Pack the float32 experts of a CPU model in place; return the number of modules with experts."""
    if not is_available():
        return 0
    modules = [module for module in model.modules() if has_packable_experts(module)]
    for module in modules:
        names = [name for name in _EXPERT_WEIGHTS if hasattr(module, name)]
        setattr(module, PACKED_EXPERTS, {name: _pack_weights(module, name) for name in names})
        module.config._experts_implementation = _EXPERTS  # type: ignore[union-attr]
    return len(modules)


def has_packable_experts(module: Any) -> bool:
    """Return whether Transformers lets our function compute `module`, and its weights can be packed."""
    candidates = [getattr(module, name, None) for name in _EXPERT_WEIGHTS]
    weights = [weight for weight in candidates if isinstance(weight, nn.Parameter)]
    return (
        # What Transformers gives to experts that a registered function may compute.
        hasattr(module, "is_transposed")
        and bool(weights)
        and all(w.dim() == 3 and w.dtype == torch.float32 and w.device.type == "cpu" for w in weights)
    )


def _pack_weights(module: Any, name: str) -> list[Tensor]:
    """Return the packed weights of each expert and free the plain ones."""
    weights = getattr(module, name).detach()
    # The module lets go of the plain weights: both forms together would take twice the memory.
    setattr(module, name, None)
    # Some families store [in, out], and packing takes [out, in].
    return [pack(w.T.contiguous() if module.is_transposed else w) for w in weights]


def _compute_experts(self: Any, x_TH: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Return the experts' outputs, weighted and summed in the order of experts_TK."""
    packed = getattr(self, PACKED_EXPERTS)
    normed = getattr(self, "has_post_expert_norm", False)  # set by Transformers after 5.17
    first = "gate_up_proj" if self.has_gate else "up_proj"
    out_TKH = x_TH.new_zeros(*experts_TK.shape, x_TH.shape[-1])
    for expert in sorted(set(experts_TK.flatten().tolist())):
        tokens, places = (experts_TK == expert).nonzero(as_tuple=True)
        y = packed_linear(x_TH[tokens], packed[first][expert], _expert_bias(self, first, expert))
        y = self._apply_gate(y) if self.has_gate else self.act_fn(y)
        y_NH = packed_linear(y, packed["down_proj"][expert], _expert_bias(self, "down_proj", expert))
        out_TKH[tokens, places] = self.post_expert_norm(y_NH) if normed else y_NH
    # One sum over K, in the order of the token's own experts: other tokens do not change it.
    return (out_TKH * weights_TK.unsqueeze(-1)).sum(1).to(x_TH.dtype)


def _expert_bias(self: Any, name: str, expert: int) -> Tensor | None:
    return getattr(self, f"{name}_bias")[expert] if self.has_bias else None


ExpertsInterface.register(_EXPERTS, _compute_experts)


class _Product:
    """The product of several layers that read the same input; the result is freed after its last part is read."""

    def __init__(self, layer: Any, parts: int) -> None:
        self.layer, self.parts = layer, parts
        self.x: Tensor | None = None
        self.y: Tensor | None = None
        self.num_unread = 0

    def __call__(self, x: Tensor, start: int, stop: int) -> Tensor:
        # Identity is enough: these layers get the very same tensor.
        if self.x is not x or self.y is None:
            # An old result is freed first, so that two never exist at once.
            self.x = self.y = None
            self.y = self.layer(x)
            self.x, self.num_unread = x, self.parts
        part = self.y[..., start:stop]
        self.num_unread -= 1
        if not self.num_unread:
            self.x = self.y = None
        return part


class MergedLinear(nn.Module):
    """One of several merged layers: rows [start, stop) of their product."""

    def __init__(self, product: _Product, start: int, stop: int) -> None:
        super().__init__()
        self.product, self.start, self.stop = product, start, stop
        if not isinstance(product.layer, QuantizedLinear):
            # A view of the product's weight: families that read a layer's weight find it, and it takes no memory.
            self.weight = nn.Parameter(product.layer.weight[start:stop], requires_grad=False)
            bias = product.layer.bias
            self.bias = None if bias is None else nn.Parameter(bias[start:stop], requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return this layer's part of the product."""
        return self.product(x, self.start, self.stop)


class LargeLinear(nn.Module):
    """A single layer that kernels/linear computes."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b."""
        return linear.linear(x, self.weight, self.bias)


class QuantizedLinear(nn.Module):
    """A layer, or several merged ones, whose matrix is kept packed; kernels/quantized_linear multiplies by it."""

    facts: tuple[Any, ...]
    codes: Tensor
    scale: Tensor
    zero: Tensor | None
    global_scale: Tensor | None
    input_scale: Tensor | None
    locks: Tensor | None

    def __init__(self, matrix: PackedMatrix, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = matrix.shape
        self.format, self.dtype, self.activations = matrix.format, matrix.dtype, matrix.activations
        for name in (*TENSORS, "input_scale", "locks"):
            self.register_buffer(name, None, persistent=False)
        self.set(matrix)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)

    def set(self, matrix: PackedMatrix, locks: Tensor | None = None) -> None:
        """Keep a matrix of the same values, and what its kernels need beside it."""
        self.facts, self.locks = matrix.facts, locks
        self.block_rows, self.input_scale = matrix.block_rows, matrix.input_scale
        for name in TENSORS:
            setattr(self, name, getattr(matrix, name))

    @property
    def matrix(self) -> PackedMatrix:
        """Return the matrix."""
        shape, *_, rounded, layout = self.facts
        tensors = self.codes, self.scale, self.dtype, getattr(torch, rounded), self.zero, self.global_scale
        inputs = self.block_rows, self.activations, self.input_scale
        return PackedMatrix(self.format, *tensors, *inputs, layout, tuple(shape))

    @property
    def weight(self) -> Tensor:
        """Return the plain weight [N, K], computed at each access, for models that read its dtype or values."""
        ones_KK = torch.eye(self.in_features, dtype=self.dtype, device=self.codes.device)
        if self.activations is Activations.NONE:
            return self._multiply(ones_KK, None).T
        codes_KK, scale = quantize_activations(ones_KK, self.activations, ones_KK.new_ones(1).float())
        return self._multiply(codes_KK, scale).T

    def _multiply(self, x: Tensor, x_scale: Tensor | None) -> Tensor:
        y: Tensor = torch.ops.nibble.quantized_linear(
            x, x_scale, self.codes, self.scale, self.zero, self.global_scale, self.locks, *self.facts
        )
        return y

    def forward(self, x: Tensor) -> Tensor:
        """Return x W^T + b."""
        x_scale = None
        if self.activations is not Activations.NONE:
            x, x_scale = quantize_activations(x, self.activations, self.input_scale)
        y = self._multiply(x, x_scale)
        return y if self.bias is None else y + self.bias


def set_packed(model: nn.Module, packer: Packer) -> int:
    """Replace layers and experts of a loaded model whose matrices are kept packed, in place; return their number."""
    count = 0
    for name, layer, matrix in packer.matrices(model):
        model.set_submodule(name, QuantizedLinear(matrix, layer.bias))
        count += 1
    for module, matrices in packer.experts(model):
        set_packed_experts(module, matrices)
        count += 1
    return count


def quantized_layers(model: nn.Module) -> list[QuantizedLinear]:
    """Return the packed layers of a model, each product of merged ones once."""
    products = (getattr(getattr(module, "product", None), "layer", module) for module in model.modules())
    return list({id(layer): layer for layer in products if isinstance(layer, QuantizedLinear)}.values())


def compile_ahead(config: PretrainedConfig, quantization: Quantization, packer: Packer) -> None:
    """Begin to compile the kernels of packed layers on a GPU, while their weights are read.

    Args:
        config: of the model.
        quantization: of its weights.
        packer: keeps them.
    """
    if packer.device.type == "cuda" and packer.linears:
        quantized_linear.compile_ahead(expected_keys(config, quantization, packer), packer.device)


def expected_keys(config: PretrainedConfig, quantization: Quantization, packer: Packer) -> set[KernelKey]:
    """Return what kernels of packed layers will be chosen by, as far as the config tells.

    A guess: weights may be stored otherwise, and then kernels are compiled when that shows.
    """
    bare = skeleton(deepcopy(config))
    layers = {name: module for name, module in bare.named_modules() if type(module) is nn.Linear}
    groups = linears_by_input(config)
    in_groups = {name for names in groups for name in names}
    keys = set[KernelKey | None]()
    for names in (*groups, *((name,) for name in layers if name not in in_groups)):
        formats = {quantization.format_of(name) for name in names}
        shapes = [(layers[name].out_features, layers[name].in_features) for name in names]
        if len(formats) == 1 and (stored := formats.pop()) and not names[0].endswith(ALWAYS_PLAIN):
            keys.add(packer.expected_key(stored, *shapes))
    return {key for key in keys if key}


def prepare_quantized(model: nn.Module) -> None:
    """Bring the packed layers of a model on a GPU into the layout of their kernels, in place.

    Kernels are compiled meanwhile; check_kernels() waits for them.

    Raises:
        BackendError: They cannot be.
    """
    layers = quantized_layers(model)
    if not layers or not layers[0].codes.is_cuda:
        return
    prepare = quantized_linear.Preparation([layer.matrix for layer in layers])
    for layer in layers:  # one after the other: nothing else holds what was there before
        layer.set(*prepare(layer.matrix))
    setattr(model, KERNELS, prepare)


def check_kernels(model: nn.Module, most_rows: int) -> None:
    """Hold the kernels of a model's packed layers against their definition, once, over the layers as they are served.

    Args:
        model: from prepare_quantized().
        most_rows: tokens of a step, at most.

    Raises:
        BackendError: one does not compile, or is wrong.
    """
    if kernels := getattr(model, KERNELS, None):
        served = [(layer.matrix, layer.locks) for layer in quantized_layers(model)]
        kernels.test(served, most_rows)


def prepare_linears(model: Any, *, deterministic: bool = False) -> None:
    """Replace the linear layers and experts of `model` by faster ones, in place; prepare_quantized() comes after it.

    Args:
        model: as Transformers loads it, with its packed layers.
        deterministic: leave out kernels that compute few rows in another order than many.
    """
    if not next(model.parameters()).is_cuda:
        if quantized_layers(model):
            merge_linears(model, packed_only=True)
        pack_linears(model)
        pack_experts(model)
        return
    if deterministic:
        merge_linears(model)
    else:
        merge_and_tune_linears(model)
        serve_experts(model)
        serve_routers(model)
        join_shared_experts(model)


def merge_and_tune_linears(model: Any) -> None:
    """Prepare the linear layers of `model` for steps of few tokens, in place.

    The output layer stays as it is: libraries read a weight that large at full speed.
    """
    merge_linears(model)
    output = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    merged = {
        id(module.product): module.product for module in model.modules() if isinstance(module, MergedLinear)
    }
    products = [product for product in merged.values() if type(product.layer) is nn.Linear]
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not output
    ]
    linear.compile_ahead(
        [*(p.layer.weight for p in products), *(layer.weight for _, layer in layers), *_narrow_weights(model)]
    )
    gates = [weight for weight in _gates(products, layers) if gated.may_serve(weight)]
    linear.compile_ahead(gates, gated.OPERATION)
    for product in products:
        if linear.serves(product.layer.weight):
            product.layer = LargeLinear(product.layer)
    for name, module in layers:
        if linear.serves(module.weight):
            model.set_submodule(name, LargeLinear(module))
    # Trials take memory, which the cache has later.
    narrow_weights(model)
    for weight in gates:
        linear.decide(weight, gated.OPERATION)


def _gates(products: Sequence[_Product], layers: Sequence[tuple[str, nn.Linear]]) -> list[Tensor]:
    """Return weights whose outputs are likely to be gates, and as many that these gate; the compiled graph tells."""
    halves = [p.layer.weight for p in products if p.parts == 2]
    return halves + [layer.weight for name, layer in layers if name.endswith(GATE_UP)]


def narrow_weights(model: nn.Module) -> list[Tensor]:
    """Return weights of few outputs that kernels/linear multiplies faster, routers' for instance.

    Each shape takes a trial, the first time.
    """
    return [weight for weight in _narrow_weights(model) if linear.serves(weight)]


def _narrow_weights(model: nn.Module) -> list[Tensor]:
    return [x for x in model.parameters() if x.dim() == 2 and len(x) <= linear.NARROW]


def merge_linears(model: Any, *, packed_only: bool = False) -> int:
    """Merge linear layers of `model` that read the same input, in place; return the number of layers merged.

    Args:
        model: the model.
        packed_only: leave plain layers as they are.
    """
    count = 0
    for names in linears_by_input(model.config):
        layers = [model.get_submodule(name) for name in names]
        is_packed = isinstance(layers[0], QuantizedLinear)
        if (is_packed or not packed_only) and _can_merge_layers(layers):
            _merge_layers(model, names)
            count += len(names)
    return count


def linears_by_input(config: PretrainedConfig) -> list[tuple[str, ...]]:
    """Return the names of linear layers that get the same tensor, in the order of their calls."""
    bare: Any = skeleton(deepcopy(config))  # a copy: skeleton() changes the config
    calls: dict[int, list[str]] = {}
    inputs = []  # kept alive, so that no two have the same id

    def note(name: str, x: Tensor) -> None:
        inputs.append(x)
        calls.setdefault(id(x), []).append(name)

    for name, module in bare.named_modules():
        if type(module) is nn.Linear:
            # name=name binds the name of this turn; the bare variable would be the last name for all hooks.
            module.register_forward_pre_hook(lambda _, args, name=name: note(name, args[0]))
    record_calls(bare, bare.config.model_type)
    # A layer that is called twice may get other inputs at the other call.
    called = [name for names in calls.values() for name in names]
    return [
        tuple(names)
        for names in calls.values()
        if len(names) > 1 and all(called.count(n) == 1 for n in names)
    ]


def _can_merge_layers(modules: Sequence[Any]) -> bool:
    """Return whether layers can be merged: linear layers, plain or packed alike, all with a bias or none."""
    if all(isinstance(module, QuantizedLinear) for module in modules):
        packed = {(m.in_features, m.format, m.activations, m.facts[1:], m.bias is None) for m in modules}
        return len(packed) == 1
    if not all(type(module) is nn.Linear for module in modules):
        return False
    kinds = {(m.in_features, m.weight.dtype, m.weight.device, m.bias is None) for m in modules}
    return len(kinds) == 1


def _merge_layers(model: Any, names: Sequence[str]) -> None:
    layers: list[Any] = [model.get_submodule(name) for name in names]
    bias = None if layers[0].bias is None else torch.cat([layer.bias.detach() for layer in layers])
    product, start = _Product(_merged(layers, bias), len(layers)), 0
    for name, layer in zip(names, layers, strict=True):
        stop = start + layer.out_features
        model.set_submodule(name, MergedLinear(product, start, stop))
        start = stop


def _merged(layers: Sequence[Any], bias: Tensor | None) -> nn.Module:
    """Return one layer with the rows of all."""
    if isinstance(layers[0], QuantizedLinear):
        return QuantizedLinear(merged([layer.matrix for layer in layers]), bias)
    weight = torch.cat([layer.weight.detach() for layer in layers])
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
