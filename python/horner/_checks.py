"""Arguments of one kind each: what is expected, what was given."""

import operator

import torch


def kind(x):
    return "None" if x is None else type(x).__name__


def text(name, x):
    if not isinstance(x, str):
        raise TypeError(f"{name} must be a str, got {kind(x)}")
    return x if x.isprintable() else x.encode("unicode_escape").decode()  # a NUL would end the message


def number(name, x, optional=True):
    if optional and x is None or isinstance(x, float):
        return x
    try:
        if not isinstance(x, (str, bytes, bytearray)):
            return float(x)
    except OverflowError:
        return float("inf")  # which the library refuses
    except (TypeError, ValueError, RuntimeError):
        pass
    raise TypeError(f"{name} must be a number, got {kind(x)}")


def size(name, x):
    try:
        n = operator.index(x)
    except TypeError:
        raise TypeError(f"{name} must be an int, got {kind(x)}") from None
    if not 0 < n < 2**31:
        raise RuntimeError(f"{name} must be 1 to {2**31 - 1}, got {n}")
    return n


def seed(x, device):
    """A seed as a tensor, None as it is."""
    if x is None or isinstance(x, torch.Tensor):
        return x
    try:
        n = x if type(x) is int else operator.index(x)
    except TypeError:
        raise TypeError(f"seed must be an int or a torch.Tensor, got {kind(x)}") from None
    if not -(2**63) <= n < 2**63:
        raise RuntimeError(f"seed must be an integer of 64 bits, got {n}")
    return torch.tensor([n], dtype=torch.int64, device=device)


def shape_text(shape):
    """[B, G, S]; letters in lower case stand for axes that may have size 1."""
    return "[" + ", ".join(x.upper() + " or 1" if x.islower() and x != "n" else x for x in shape) + "]"
