from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar, overload

from numba.core.types import Type as Type

P = ParamSpec("P")
R = TypeVar("R")

__version__: str

@overload
def njit(*, inline: str, error_model: str = ...) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
@overload
def njit(
    signature: Type | Sequence[Type] | str,
    *,
    cache: bool = ...,
    nogil: bool = ...,
    inline: str = ...,
    error_model: str = ...,
) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def prange(start: int, stop: int = ..., step: int = ...) -> range: ...
def set_num_threads(threads: int) -> None: ...
