from collections.abc import Callable
from typing import Any

# Called from kernels, without the typing context that its definition begins with.
def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]: ...
