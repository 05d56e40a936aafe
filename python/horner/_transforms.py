"""`attend` under torch.func's transforms and forward-mode differentiation.

The library's kernels give the result and its gradients. What they have no code for (tangents, gradients of gradients) is
that of `torch.ops.horner.attend_reference`, which torch sees as its own operators. vmap becomes a larger batch.
"""

import torch
from torch.autograd import forward_ad

_ops = torch.ops.horner
_ROWS = _ops.inputs()  # name, shape, role, meaning
_NAMES = [row[0] for row in _ROWS]
_BATCHED = [row[1].startswith("B") for row in _ROWS]
_DIFFERENTIABLE = [row[2] not in ("constant", "mask") for row in _ROWS]


_are_active = torch._C._are_functorch_transforms_active


def active() -> bool:
    """Whether a transform may be at work on the tensors of a call."""
    return _are_active() or forward_ad._current_level >= 0


def check_none(what, instead, *tensors):
    """Raises where a transform is at work, or one of the tensors has a tangent."""
    dual = forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(x).tangent is not None for x in tensors if x is not None)
    if dual or _are_active():
        raise RuntimeError(f"{what} is not supported under torch.func's transforms and forward-mode differentiation: {instead}")


def attend(settings, q, k, v, inputs) -> torch.Tensor:
    """The tensors are those of the library's table, in its order; absent ones are None."""
    return _Attend.apply(_Settings(tuple(settings)), q, k, v, *(inputs.get(name) for name in _NAMES[3:]))


def attend_rows(rows, settings, q, k, v, inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """With statistics of each row [rows, B, H, T], which have no gradient."""
    return _AttendRows.apply(_Settings(tuple(settings), rows=rows), q, k, v, *(inputs.get(name) for name in _NAMES[3:]))


class _Settings:
    """What torch.func takes for one argument and not for a tree of them. `wanted`: the places of gradients."""

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


def _fold(n, dim, x):
    """The batch of vmap as a part of the batch."""
    return (x.movedim(dim, 0) if dim is not None else x.expand(n, *x.shape)).flatten(0, 1)


def _folded(n, in_dims, tensors):
    return [
        _fold(n, dim, x) if isinstance(x, torch.Tensor) and batched else x
        for x, dim, batched in zip(tensors, in_dims, _BATCHED)
    ]


def _one_by_one(n, in_dims, tensors, function):
    def at(i):
        return [x if dim is None or not isinstance(x, torch.Tensor) else x.select(dim, i) for x, dim in zip(tensors, in_dims)]

    return [function(*at(i)) for i in range(n)]


def _can_fold(in_dims, tensors):
    """Not where something with a batch of 1 or more, which is for all, would have to grow with the others, nor with
    dropout, which knows a sequence by its place in the batch."""
    shared = any(isinstance(x, torch.Tensor) and (row[1].startswith("b") or row[0] == "seed") for x, row in zip(tensors, _ROWS))
    return not shared and all(dim is None or batched for dim, batched in zip(in_dims, _BATCHED))


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
        n, in_dims = info.batch_size, in_dims[1:]
        if not _can_fold(in_dims, tensors):
            return torch.stack(_one_by_one(n, in_dims, tensors, lambda *x: _Attend.apply(settings, *x))), 0
        return _Attend.apply(settings, *_folded(n, in_dims, tensors)).unflatten(0, (n, -1)), 0


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
        n, in_dims = info.batch_size, in_dims[1:]
        if not _can_fold(in_dims, tensors):
            each = _one_by_one(n, in_dims, tensors, lambda *x: _AttendRows.apply(settings, *x))
            return tuple(torch.stack(list(x)) for x in zip(*each)), (0, 0)
        out, rows = _AttendRows.apply(settings, *_folded(n, in_dims, tensors))
        return (out.unflatten(0, (n, -1)), rows.unflatten(1, (n, -1))), (0, 1)


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
        return tuple(g.unflatten(0, (n, -1)) for g in out), (0,) * len(settings.wanted)
