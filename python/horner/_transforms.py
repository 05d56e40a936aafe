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


def active() -> bool:
    """Whether a transform may be at work on the tensors of a call."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def attend(settings, q, k, v, inputs) -> torch.Tensor:
    """The tensors are those of the library's table, in its order; absent ones are None."""
    return _Attend.apply(_Settings(tuple(settings)), q, k, v, *(inputs.get(name) for name in _NAMES[3:]))


class _Settings:
    """What torch.func takes for one argument and not for a tree of them. `wanted`: the places of gradients."""

    def __init__(self, values, wanted=()):
        self.values, self.wanted = values, wanted

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


def _folded(n, in_dims, tensors):
    """The batch of vmap as a part of the batch: each tensor with both."""
    out = []
    for x, dim, batched in zip(tensors, in_dims, _BATCHED):
        if isinstance(x, torch.Tensor) and batched:
            x = x.movedim(dim, 0) if dim is not None else x.expand(n, *x.shape)
            x = x.flatten(0, 1)
        out.append(x)
    return out


def _one_by_one(n, in_dims, tensors, function):
    def at(i):
        return [x if dim is None or not isinstance(x, torch.Tensor) else x.select(dim, i) for x, dim in zip(tensors, in_dims)]

    return [function(*at(i)) for i in range(n)]


def _can_fold(in_dims):
    return all(dim is None or batched for dim, batched in zip(in_dims, _BATCHED))


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(settings, *tensors):
        return settings.call(_ops.attend.default, (), tensors)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.settings, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def backward(ctx, grad):
        tensors = ctx.saved_tensors
        wanted = tuple(_given(tensors, ctx.needs_input_grad[1:]))
        gradients = _Gradients.apply(_Settings(ctx.settings.values, wanted), grad, *tensors)
        out = [None] * len(_ROWS)
        for i, g in zip(wanted, gradients):
            out[i] = g
        return (None, *out)

    @staticmethod
    def jvp(ctx, _, *tangents):
        tensors = ctx.saved_tensors
        places = [i for i in _given(tensors) if tangents[i] is not None]
        return _pushed(_reference(ctx.settings, tensors, places), [tensors[i] for i in places], [tangents[i] for i in places])

    @staticmethod
    def vmap(info, in_dims, settings, *tensors):
        n, in_dims = info.batch_size, in_dims[1:]
        if not _can_fold(in_dims):
            return torch.stack(_one_by_one(n, in_dims, tensors, lambda *x: _Attend.apply(settings, *x))), 0
        return _Attend.apply(settings, *_folded(n, in_dims, tensors)).unflatten(0, (n, -1)), 0


def _pushed(function, primals, tangents):
    """The product of the Jacobian and the tangents: the transpose of the transpose, since the kernels of torch's own
    forward mode cannot be nested."""
    out, pull = torch.func.vjp(function, *primals)
    return torch.func.vjp(lambda g: pull(g), torch.zeros_like(out))[1](tuple(tangents))[0]


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(call, grad, *tensors):
        return tuple(call.call(_ops.attend_backward.default, (grad, call.wanted), tensors))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.call, *tensors = inputs
        ctx.save_for_backward(*tensors)
        ctx.save_for_forward(*tensors)

    @staticmethod
    def _again(ctx):
        """The gradients as a function of the gradient of the result and the tensors, made of torch's operators."""
        grad, *tensors = ctx.saved_tensors
        places = _given(tensors)

        def function(grad, *some):
            given = dict(zip(places, some))
            all_ = [given.get(i, x) for i, x in enumerate(tensors)]
            wanted = ctx.call.wanted
            pull = torch.func.vjp(_reference(ctx.call, all_, wanted), *(all_[i] for i in wanted))[1]
            return pull(grad)

        return function, places, [grad, *(tensors[i] for i in places)]

    @staticmethod
    def backward(ctx, *gradients):
        function, places, primals = _Gradients._again(ctx)
        first, *rest = torch.func.vjp(function, *primals)[1](gradients)
        out = [None] * len(_ROWS)
        for i, g in zip(places, rest):
            out[i] = g
        return (None, first, *out)

    @staticmethod
    def jvp(ctx, _, grad, *tangents):
        function, places, primals = _Gradients._again(ctx)
        given = [grad, *(tangents[i] for i in places)]
        zeros = [torch.zeros_like(x) if t is None else t for x, t in zip(primals, given)]
        return _pushed_all(function, primals, zeros)

    @staticmethod
    def vmap(info, in_dims, call, grad, *tensors):
        n, grad_dim, dims = info.batch_size, in_dims[1], in_dims[2:]
        if not _can_fold(dims) or not all(_BATCHED[i] for i in call.wanted):
            each = _one_by_one(n, (grad_dim, *dims), (grad, *tensors), lambda *x: _Gradients.apply(call, *x))
            return tuple(torch.stack(list(x)) for x in zip(*each)), (0,) * len(call.wanted)
        grad = grad.movedim(grad_dim, 0) if grad_dim is not None else grad.expand(n, *grad.shape)
        out = _Gradients.apply(call, grad.flatten(0, 1), *_folded(n, dims, tensors))
        return tuple(g.unflatten(0, (n, -1)) for g in out), (0,) * len(call.wanted)


def _pushed_all(function, primals, tangents):
    out, pull = torch.func.vjp(function, *primals)
    return torch.func.vjp(lambda *g: pull(g), *(torch.zeros_like(x) for x in out))[1](tuple(tangents))
