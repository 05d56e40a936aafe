"""`attend` under torch.func's transforms and forward-mode differentiation.

The library's kernels compute the result and its gradients. Tangents and gradients of gradients are those of
`torch.ops.horner.attend_reference`, which consists of torch's own operators. vmap becomes a larger batch.
"""

import contextlib

import torch
from torch._C._functorch import TransformType, is_functorch_wrapped_tensor
from torch._functorch import autograd_function, pyfunctorch
from torch.autograd import forward_ad

_ops = torch.ops.horner
_ROWS = _ops.inputs()  # name, shape, role, meaning
_NAMES = [row[0] for row in _ROWS]
_BATCHED = [row[1].startswith("B") for row in _ROWS]
_DIFFERENTIABLE = [row[2] not in ("constant", "mask") for row in _ROWS]


_are_active = torch._C._are_functorch_transforms_active


def active() -> bool:
    """Whether a transform may apply to the tensors of a call."""
    return _are_active() or forward_ad._current_level >= 0


def check_none(what, instead, *tensors):
    """Raises if a transform is active, or one of the tensors has a tangent."""
    dual = forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors if x is not None)
    if dual or _are_active():
        raise RuntimeError(f"{what} is not supported under torch.func's transforms and forward-mode differentiation: {instead}")


def _functionalized():
    """Whether torch.func.functionalize is at work, which sees operators and no function of Python, and whether without any
    other transform than vmap."""
    keys = {interpreter.key() for interpreter in pyfunctorch.retrieve_all_functorch_interpreters()}
    alone = keys <= {TransformType.Functionalize, TransformType.Vmap} and forward_ad._current_level < 0
    return TransformType.Functionalize in keys, alone


def _prepared(settings, q, k, v, inputs):
    """The tensors of the library's table, in its order and checked, with absent ones as None. Under autocast q, k and v have
    its dtype, as its operator gives them, and autocast is off in the context: gradients, which may run later, are of the same
    numbers."""
    tensors = [q, k, v, *(inputs.get(name) for name in _NAMES[3:])]
    for name, x in zip(_NAMES, tensors):
        if x is not None and not is_functorch_wrapped_tensor(x) and x.numel() > 0 and not x.is_meta and x.untyped_storage().nbytes() == 0:
            raise RuntimeError(f"{name} must be in memory, got a tensor whose storage was freed")
    kind = q.device.type
    context = contextlib.nullcontext()
    if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind):
        context, dtype = torch.autocast(kind, enabled=False), torch.get_autocast_dtype(kind)
        tensors[:3] = [x.to(dtype) if x.is_floating_point() and x.dtype != torch.double else x for x in tensors[:3]]
    with torch._C._DisableFuncTorch():  # which would wrap plain tensors too
        settings.call(_ops.check_call.default, (), tensors)
    return context, tensors


def attend(settings, q, k, v, inputs) -> torch.Tensor:
    settings = _Settings(tuple(settings))
    context, tensors = _prepared(settings, q, k, v, inputs)
    functionalized, alone = _functionalized()
    with context:
        if functionalized:
            return settings.call((_ops.attend if alone else _ops.attend_reference).default, (), tensors)
        return _Attend.apply(settings, *tensors)


def attend_rows(rows, settings, q, k, v, inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """With statistics of each row [rows, B, H, T], which have no gradient."""
    settings = _Settings(tuple(settings), rows=rows)
    context, tensors = _prepared(settings, q, k, v, inputs)
    functionalized, alone = _functionalized()
    if functionalized and not alone:
        raise RuntimeError(
            "horner.statistics and return_lse do not support torch.func.functionalize together with a derivative of torch.func: "
            "leave one of them out"
        )
    with context:
        return settings.call(_ops.attend_rows.default, (rows,), tensors) if functionalized else _AttendRows.apply(settings, *tensors)


class _Settings:
    """The settings of a call as an object, which torch.func passes on as one argument. `wanted`: the inputs that require a
    gradient, by their places in the table."""

    def __init__(self, values, wanted=(), rows=0):
        self.values, self.wanted, self.rows = values, wanted, rows

    def call(self, op, first, tensors):
        return op(*first, *tensors[:3], *self.values, **dict(zip(_NAMES[3:], tensors[3:])))


def _reference(settings, tensors, places):
    """The definition as a function of the tensors at these places."""

    def function(*some):
        all_ = list(tensors)
        for place, x in zip(places, some):
            all_[place] = x
        return settings.call(_ops.attend_reference.default, (), all_)

    return function


def _given(tensors, which=None):
    return [i for i, x in enumerate(tensors) if isinstance(x, torch.Tensor) and _DIFFERENTIABLE[i] and (which is None or which[i])]


def _placed(places, values):
    """One for each row of the table: the values at their places, None elsewhere."""
    given = dict(zip(places, values))
    return [given.get(i) for i in range(len(_ROWS))]


def _batch(dim, x):
    """The batch of a tensor that has the batch of vmap in this axis."""
    return [size for axis, size in enumerate(x.shape) if axis != dim][0]


def _fold(n, dim, x):
    """The batch of vmap as a part of the batch."""
    return (x.movedim(dim, 0) if dim is not None else x.expand(n, *x.shape)).flatten(0, 1)


def _folded(n, in_dims, tensors):
    return [
        _fold(n, dim, x) if isinstance(x, torch.Tensor) and batched else x
        for x, dim, batched in zip(tensors, in_dims, _BATCHED)
    ]


def _one_by_one(n, in_dims, tensors, function):
    if n == 0:
        raise RuntimeError(
            "vmap of an empty batch requires tensors with an axis of batch: parameters, or a bias or a seed beside them, are "
            "mapped one by one, and there is none"
        )

    def at(i):
        return [x if dim is None or not isinstance(x, torch.Tensor) else x.select(dim, i) for x, dim in zip(tensors, in_dims)]

    return [function(*at(i)) for i in range(n)]


def _can_fold(in_dims, tensors):
    """Whether the axis of vmap can become a part of the batch: not of parameters, not beside a bias, whose batch may be 1,
    and not with dropout, which depends on the place of a sequence in the batch."""
    shared = any(isinstance(x, torch.Tensor) and (row[1].startswith("b") or row[0] == "seed") for x, row in zip(tensors, _ROWS))
    return not shared and all(dim is None or batched for dim, batched in zip(in_dims, _BATCHED))


def _mapped(function, n, in_dims, tensors, out_dims):
    """A function of the tensors that gives several, mapped: as a larger batch, or one by one."""
    if not _can_fold(in_dims, tensors):
        each = _one_by_one(n, in_dims, tensors, function)
        return tuple(torch.stack(results, dim) for results, dim in zip(zip(*each), out_dims))
    batch = _batch(in_dims[0], tensors[0])
    results = function(*_folded(n, in_dims, tensors))
    return tuple(x.unflatten(dim, (n, batch)) for x, dim in zip(results, out_dims))


def _pushed(function, primals, tangents):
    """The product of the Jacobian and the tangents, for a function of several results: the transpose of the transpose,
    since the kernels of torch's own forward mode cannot be nested."""
    out, pull = torch.func.vjp(function, *primals)
    return torch.func.vjp(lambda *g: pull(g), *(torch.zeros_like(x) for x in out))[1](tuple(tangents))


class _Saved(torch.autograd.Function):
    """A function of settings and tensors that keeps both."""

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.settings, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)


class _Attend(_Saved):
    @staticmethod
    def forward(settings, *tensors):
        return settings.call(_ops.attend.default, (), tensors)

    @staticmethod
    def backward(ctx, grad):
        tensors = ctx.saved_tensors
        wanted = tuple(_given(tensors, ctx.needs_input_grad[1:]))
        gradients = _Gradients.apply(_Settings(ctx.settings.values, wanted), grad, *tensors)
        return (None, *_placed(wanted, gradients))

    @staticmethod
    def jvp(ctx, _, *tangents):
        tensors = ctx.saved_tensors
        places = [i for i in _given(tensors) if tangents[i] is not None]
        function = _reference(ctx.settings, tensors, places)
        (out,) = _pushed(lambda *x: (function(*x),), [tensors[i] for i in places], [tangents[i] for i in places])
        return out

    @staticmethod
    def vmap(info, in_dims, settings, *tensors):
        return _mapped(lambda *x: (_Attend.apply(settings, *x),), info.batch_size, in_dims[1:], tensors, (0,))[0], 0


class _AttendRows(_Attend):
    @staticmethod
    def forward(settings, *tensors):
        return settings.call(_ops.attend_rows.default, (settings.rows,), tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _Saved.setup_context(ctx, inputs, output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad, _):
        return _Attend.backward(ctx, grad)

    @staticmethod
    def jvp(ctx, *tangents):
        return _Attend.jvp(ctx, *tangents), None

    @staticmethod
    def vmap(info, in_dims, settings, *tensors):
        return _mapped(lambda *x: _AttendRows.apply(settings, *x), info.batch_size, in_dims[1:], tensors, (0, 1)), (0, 1)


class _Gradients(_Saved):
    @staticmethod
    def forward(settings, grad, *tensors):
        return tuple(settings.call(_ops.attend_backward.default, (grad, settings.wanted, None), tensors))

    @staticmethod
    def _again(ctx):
        """The gradients as a function of the gradient of the result and the tensors, made of torch's operators."""
        grad, *tensors = ctx.saved_tensors
        places = _given(tensors)

        def function(grad, *some):
            given = dict(zip(places, some))
            all_ = [given.get(i, x) for i, x in enumerate(tensors)]
            wanted = ctx.settings.wanted
            pull = torch.func.vjp(_reference(ctx.settings, all_, wanted), *(all_[i] for i in wanted))[1]
            return pull(grad)

        return function, places, [grad, *(tensors[i] for i in places)]

    @staticmethod
    def backward(ctx, *gradients):
        function, places, primals = _Gradients._again(ctx)
        first, *rest = torch.func.vjp(function, *primals)[1](gradients)
        return (None, first, *_placed(places, rest))

    @staticmethod
    def jvp(ctx, _, grad, *tangents):
        function, places, primals = _Gradients._again(ctx)
        given = [grad, *(tangents[i] for i in places)]
        zeros = [torch.zeros_like(x) if t is None else t for x, t in zip(primals, given)]
        return _pushed(function, primals, zeros)

    @staticmethod
    def vmap(info, in_dims, settings, grad, *tensors):
        n, grad_dim, dims = info.batch_size, in_dims[1], in_dims[2:]
        if not _can_fold(dims, tensors) or not all(_BATCHED[i] for i in settings.wanted):
            each = _one_by_one(n, (grad_dim, *dims), (grad, *tensors), lambda *x: _Gradients.apply(settings, *x))
            return tuple(torch.stack(list(x)) for x in zip(*each)), (0,) * len(settings.wanted)
        out = _Gradients.apply(settings, _fold(n, grad_dim, grad), *_folded(n, dims, tensors))
        return tuple(g.unflatten(0, (n, _batch(grad_dim, grad))) for g in out), (0,) * len(settings.wanted)


# vmap in a compiled function, which calls the operators: the same rules.
_library = torch.library.Library("horner", "IMPL")


def _batched(op, first, out_dims):
    """The rule of an operator with so many arguments before q, k and v."""

    def kernel(_, *arguments, **inputs):
        settings = _Settings(arguments[first + 3 :])
        tensors = (*arguments[first : first + 3], *(inputs.get(name) for name in _NAMES[3:]))

        def call(*tensors):
            return settings.call(op, arguments[:first], tensors)

        def rule(info, in_dims, *tensors):
            if first:
                return _mapped(call, info.batch_size, in_dims, tensors, out_dims), out_dims
            return _mapped(lambda *x: (call(*x),), info.batch_size, in_dims, tensors, out_dims)[0], 0

        interpreter = pyfunctorch.retrieve_current_functorch_interpreter()
        return autograd_function.custom_function_call_vmap_helper(interpreter, rule, call, *tensors)

    _library.impl(op, kernel, "FuncTorchBatched", with_keyset=True)


_batched(_ops.attend.default, 0, (0,))
_batched(_ops.attend_rows.default, 1, (0, 1))
