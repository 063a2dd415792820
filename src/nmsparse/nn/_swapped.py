"""Classes of ours in the place of others: what they share, and which class they replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import nn


class Swapped:
    """A class of ours in the place of another."""

    is_swapped = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Whoever writes ``type(layer)(...)``, as in a ``__deepcopy__``, means the class from before the swap: a dense layer."""
        self.__class__ = dense_class(type(self))  # pyrefly: ignore
        self.__init__(*args, **kwargs)


class Unannounced:
    """First base of a class made on demand: what somebody's class does to its subclasses (a registry, say) is not for ours."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def dense_class(kind: type[nn.Module]) -> type[nn.Module]:
    """The class that one of ours replaced; any other class is its own."""
    return next(base for base in kind.__mro__ if issubclass(base, nn.Module) and not getattr(base, "is_swapped", False))


def behaves_as(kind: type[nn.Module]) -> type[nn.Module] | None:
    """torch's layer whose forward a class has: it is that layer, or a subclass that adds other things to it."""
    if issubclass(kind, nn.Linear) and kind.forward is nn.Linear.forward:
        return nn.Linear
    if not issubclass(kind, nn.Conv2d):
        return None
    is_same = kind.forward is nn.Conv2d.forward and kind._conv_forward is nn.Conv2d._conv_forward
    return nn.Conv2d if is_same else None


def reduced_by(make: Callable[[type[nn.Module]], type[nn.Module] | None]) -> Callable[[nn.Module, Any], Any]:
    """``__reduce_ex__`` of a class made on demand: no name leads to it, so copies and files name what it was made from."""

    def reduce(module: nn.Module, protocol: Any) -> Any:
        return (_blank, (make, dense_class(type(module))), *object.__reduce_ex__(module, protocol)[2:])

    return reduce


def _blank(make: Callable[[type[nn.Module]], type[nn.Module] | None], kind: type[nn.Module]) -> nn.Module:
    made = cast(type[nn.Module], make(kind))
    return made.__new__(made)
